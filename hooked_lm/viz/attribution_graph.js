// Nodes by token and layer. Hovering or focusing a node shows its edges; a click or Enter keeps it, p pins it.

const SPACE = 19, LINE = 18, BOX = 24, LETTER = 7.3, LETTERS = [14, 10, 8, 6], SIDE = [9, 8, 7, 6, 5, 4, 3], LISTED = 12, DRAWN = 500, FEW = 150;
const SVG = "http://www.w3.org/2000/svg";

for (const page of document.querySelectorAll(".traced")) {
  const {nodes, edges, tokens, layers, groups, cards, words} = JSON.parse(page.querySelector("script.data").textContent);
  const find = css => page.querySelector(css), drawing = find(".scroll"), panel = find(".panel"), card = find(".card"), live = find(".live");
  const range = find(".share"), only = find(".only"), collapse = find(".collapse"), groupButton = find(".group-pins"), clear = find(".clear");
  const closed = new Map(groups.map(([name, of]) => [name, of])), pinned = new Set();
  let chosen = null, pointed = null, units = new Map(), links = [], places = new Map(), longest = LETTERS[0];

  // ---- units: nodes, and supernodes in place of their nodes -------------------------------------------------------------

  const kindOf = node => node.kind === "feature" ? words.unit : node.kind;
  const isEnd = node => node.kind === "token" || node.kind === "target";
  const shown = id => isEnd(nodes[id]) || nodes[id].share <= Number(range.value) / 1000 + 1e-9;
  const groupOf = id => collapse.checked ? [...closed].find(([, of]) => of.includes(id))?.[0] : undefined;
  const keyOf = id => { const group = groupOf(id); return group === undefined ? `n${id}` : `g${group}`; };

  function makeUnits() {
    units = new Map();
    nodes.forEach((node, id) => {
      if (!shown(id)) return;
      const key = keyOf(id);
      if (!units.has(key)) units.set(key, {key, members: [], kind: key[0] === "g" ? "group" : node.kind});
      units.get(key).members.push(id);
    });
    for (const unit of units.values()) {
      const of = unit.members.map(id => nodes[id]), mean = value => of.reduce((sum, node) => sum + value(node), 0) / of.length;
      unit.row = Math.round(mean(node => node.row));
      unit.position = Math.max(...of.map(node => node.position));
      unit.name = unit.kind === "group" ? unit.key.slice(1) : of[0].name;
      unit.text = unit.kind === "group" ? unit.name : of[0].text;
      unit.strength = Math.max(...of.map(node => node.strength));
    }
    const sums = new Map();
    for (const [source, target, weight] of edges) {
      if (!shown(source) || !shown(target)) continue;
      const ends = [keyOf(source), keyOf(target)], key = ends.join(">");
      if (ends[0] !== ends[1]) sums.set(key, {source: ends[0], target: ends[1], weight: (sums.get(key)?.weight ?? 0) + weight});
    }
    links = [...sums.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    if (only.checked && pinned.size) {
      const kept = new Set(pinned);
      for (const {source, target} of links)
        for (const [one, other] of [[source, target], [target, source]])
          if (pinned.has(one) && units.has(other) && isEnd(units.get(other))) kept.add(other);
      for (const key of units.keys()) if (!kept.has(key)) units.delete(key);
      links = links.filter(({source, target}) => units.has(source) && units.has(target));
    }
  }

  // ---- the drawing ------------------------------------------------------------------------------------------------------

  const cut = unit => {
    const most = unit.kind === "token" ? longest : 40;
    return unit.text.length > most ? `${unit.text.slice(0, most - 1)}…` : unit.text;
  };
  const width = unit => isEnd(unit) || unit.kind === "group" ? cut(unit).length * LETTER + 12 : 14;

  function layout() {
    const cells = new Map(), rows = layers.length + 2;
    for (const unit of units.values()) {
      if (unit.kind === "target") continue;
      const key = `${unit.row},${unit.position}`;
      cells.set(key, [...(cells.get(key) ?? []), unit]);
    }
    const room = drawing.clientWidth - 8, gapOf = of => Math.max(SPACE, ...of.map(unit => width(unit) + 5));
    const columnsOf = most => {  // the width of each token's column, with at most so many nodes side by side
      const found = tokens.map(token => Math.min(token.length, longest) * LETTER + 17);
      for (const of of cells.values())
        found[of[0].position] = Math.max(found[of[0].position], Math.min(of.length, most) * gapOf(of) + 8);
      return found;
    };
    const sum = columns => columns.reduce((total, each) => total + each, 0);
    const fits = ([letters, most]) => { longest = letters; return sum(columnsOf(most)) <= room; };
    const [, most] = LETTERS.flatMap(letters => SIDE.map(most => [letters, most])).find(fits) ?? [0, SIDE.at(-1)];
    const columns = columnsOf(most), wider = Math.max(0, room - sum(columns)) / columns.length, total = Math.max(room, sum(columns));
    const starts = [];
    columns.reduce((x, each) => { starts.push(x); return x + each + wider; }, 0);
    const lines = Array(rows).fill(1);  // of nodes in each row
    for (const of of cells.values()) lines[of[0].row] = Math.max(lines[of[0].row], Math.ceil(of.length / most));
    places = new Map();
    const targets = [[]];
    let used = 0;
    for (const unit of [...units.values()].filter(unit => unit.kind === "target")) {
      if (used + width(unit) + 10 > total && used) { targets.push([]); used = 0; }
      targets.at(-1).push(unit);
      used += width(unit) + 10;
    }
    targets.forEach((line, i) => {
      let x = total;
      for (const unit of line) { x -= width(unit) + 10; places.set(unit.key, {x: x + 5 + width(unit) / 2, y: 24 + 32 * i}); }
    });
    const least = Math.max(36, Math.min(64, 520 / rows)), middles = [];
    let y = 8 + 32 * targets.length + 14;
    for (let row = rows - 2; row >= 0; row--) {
      const high = Math.max(least, lines[row] * LINE + 26);
      middles[row] = y + high / 2;
      y += high;
    }
    for (const of of cells.values()) {
      const gap = gapOf(of), middle = starts[of[0].position] + (columns[of[0].position] + wider) / 2;
      const n = Math.ceil(of.length / most), each = Math.ceil(of.length / n);
      of.forEach((unit, i) => {
        const line = Math.floor(i / each), beside = Math.min(each, of.length - line * each);
        places.set(unit.key, {x: middle + (i % each - (beside - 1) / 2) * gap, y: middles[of[0].row] + (line - (n - 1) / 2) * LINE});
      });
    }
    return {total, height: y + 6, starts, columns: columns.map(each => each + wider), rowY: row => middles[row], bottom: y};
  }

  const make = (kind, attributes, parent) => {
    const found = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    if (parent) parent.append(found);
    return found;
  };
  const number = value => {
    const size = Math.abs(value), text = size >= 1000 ? value.toFixed(0) : size && size < 1e-4 ? value.toExponential(1) : value.toPrecision(3);
    return text.replace("-", "−");
  };
  const signOf = link => link.weight < 0 ? "down" : "up";
  const signed = value => (value > 0 ? "+" : "") + number(value);

  function path({source, target}) {
    const from = places.get(source), to = places.get(target), up = to.y < from.y ? 1 : -1;
    const half = key => isEnd(units.get(key)) || units.get(key).kind === "group" ? BOX / 2 : 7;
    const [y, end] = [from.y - up * half(source), to.y + up * half(target)], bend = Math.max(14, Math.abs(y - end) / 2);
    return `M${from.x.toFixed(1)} ${y.toFixed(1)}C${from.x.toFixed(1)} ${(y - up * bend).toFixed(1)} ` +
      `${to.x.toFixed(1)} ${(end + up * bend).toFixed(1)} ${to.x.toFixed(1)} ${end.toFixed(1)}`;
  }

  function draw() {
    makeUnits();
    const {total, height, starts, columns, rowY, bottom} = layout(), had = document.activeElement?.dataset?.unit;
    const svg = make("svg", {width: total, height, role: "group", "aria-label": words.drawing});
    tokens.forEach((_, i) => i % 2 || make("rect", {class: "column", x: starts[i], y: 6, width: columns[i], height: bottom - 6}, svg));
    const named = make("svg", {width: 52, height, "aria-hidden": true});
    const name = (text, y) => make("text", {class: "layer", x: 46, y}, named).textContent = text;
    layers.forEach((layer, i) => {
      make("line", {class: "row", x1: 0, x2: total, y1: rowY(i + 1), y2: rowY(i + 1)}, svg);
      name(`layer ${layer}`, rowY(i + 1));
    });
    name("tokens", rowY(0));
    name("outputs", 24);
    find(".rows").replaceChildren(named);
    const most = Math.abs(links[0]?.weight ?? 1), base = make("g", {class: "base"}, svg);
    for (const link of links.slice(0, DRAWN).reverse()) {
      const share = Math.sqrt(Math.abs(link.weight) / most);
      const [kind, opacity] = links.length > FEW ? ["", 0.06 + 0.34 * share * share] : [signOf(link), 0.2 + 0.6 * share];
      make("path", {class: `edge ${kind}`, d: path(link), "stroke-width": 0.6 + 2 * share, opacity}, base);
    }
    make("g", {class: "near"}, svg);
    for (const unit of units.values()) svg.append(drawn(unit));
    drawing.replaceChildren(svg);
    const all = [...svg.querySelectorAll(".unit")];
    if (chosen !== null && !units.has(chosen)) chosen = null;
    if (pointed !== null && !units.has(pointed)) pointed = null;
    reach(had && units.has(had) ? had : chosen ?? all.find(each => each.classList.contains("target"))?.dataset.unit);
    if (had && units.has(had)) element(had).focus({preventScroll: true});
    const count = [...units.values()].filter(unit => !isEnd(unit)).reduce((sum, unit) => sum + unit.members.length, 0);
    const all_ = nodes.filter(node => !isEnd(node)).length;
    find(".count").textContent = `${count} of ${all_} nodes, ${links.length} edges`;
    find(".bar output").textContent = `${Math.round(Number(range.value) / 10)}%`;
    focus();
    tellHeight();
  }

  function drawn(unit) {
    const {x, y} = places.get(unit.key), node = nodes[unit.members[0]], w = width(unit), classes = ["unit", unit.kind];
    if (pinned.has(unit.key)) classes.push("pinned");
    const g = make("g", {class: classes.join(" "), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, role: "button",
      "aria-label": label(unit), "aria-pressed": unit.key === chosen, tabindex: -1, "data-unit": unit.key, style: `--share:${unit.strength.toFixed(2)}`});
    if (unit.kind === "feature") make("circle", {class: "shape", r: 5 + 2 * unit.strength}, g);
    else if (unit.kind === "error") make("path", {class: "shape", d: "M0-6.5L6.5 0 0 6.5-6.5 0Z"}, g);
    else {
      make("rect", {class: "shape", x: -w / 2, y: -BOX / 2, width: w, height: BOX, rx: 6}, g);
      if (unit.kind === "target" && node.probability !== null)
        make("rect", {class: "fill", x: -w / 2, y: -BOX / 2, width: w * node.probability, height: BOX, rx: 6}, g);
      make("text", {}, g).textContent = cut(unit);
    }
    const far = isEnd(unit) || unit.kind === "group" ? w / 2 + 4 : 11;
    make("rect", {class: "ring", x: -far, y: -BOX / 2 - 4, width: 2 * far, height: BOX + 8, rx: 8}, g);
    make("title", {}, g).textContent = unit.kind === "group" ? unit.name : `${unit.name}${node.label ? `: ${node.label}` : ""}`;
    return g;
  }

  const place = position => `at ${tokens[position]}, position ${position}`;
  function label(unit) {
    const node = nodes[unit.members[0]], is = [];
    if (unit.kind === "group") is.push(`supernode ${unit.name} of ${unit.members.length} nodes`);
    else is.push(node.kind === "token" ? `token ${node.text}, position ${node.position}` : node.kind === "target" ? `output ${node.text}`
      : `${kindOf(node)} ${node.name} ${place(node.position)}`);
    if (node.label && unit.kind !== "group") is.push(node.label);
    is.push(`${into(unit.key).length} inputs, ${out(unit.key).length} outputs`);
    if (pinned.has(unit.key)) is.push("pinned");
    return is.join("; ");
  }
  const into = key => links.filter(link => link.target === key), out = key => links.filter(link => link.source === key);
  const element = key => drawing.querySelector(`[data-unit="${CSS.escape(key)}"]`);
  function reach(key) {  // one node is a stop of the Tab key
    for (const each of drawing.querySelectorAll(".unit")) each.setAttribute("tabindex", each.dataset.unit === key ? 0 : -1);
  }

  // ---- the node that is shown -------------------------------------------------------------------------------------------

  function focus() {
    const key = pointed ?? chosen, near = drawing.querySelector(".near");
    drawing.classList.toggle("focused", key !== null);
    near.replaceChildren();
    const beside = new Set([key]), own = key === null ? [] : [...into(key), ...out(key)];
    const most = Math.max(...own.map(link => Math.abs(link.weight)), 1e-12);
    for (const link of own.reverse()) {
      beside.add(link.source).add(link.target);
      const share = Math.sqrt(Math.abs(link.weight) / most);
      make("path", {class: `edge ${signOf(link)}`, d: path(link), "stroke-width": 0.8 + 4 * share,
        opacity: 0.35 + 0.6 * share}, near);
    }
    for (const each of drawing.querySelectorAll(".unit")) {
      each.classList.toggle("on", beside.has(each.dataset.unit));
      each.classList.toggle("chosen", each.dataset.unit === chosen);
      each.setAttribute("aria-pressed", each.dataset.unit === chosen);
    }
    describe(key);
    groupButton.disabled = [...pinned].filter(each => each[0] === "n" && !isEnd(nodes[Number(each.slice(1))])).length < 2;
    only.disabled = clear.disabled = !pinned.size;
  }

  const html = (kind, text, parent, name = "") => {
    const found = document.createElement(kind);
    if (text) found.textContent = text;
    if (name) found.className = name;
    if (parent) parent.append(found);
    return found;
  };

  function describe(key) {
    panel.replaceChildren();
    card.replaceChildren();
    card.hidden = true;
    if (key === null) {
      html("h3", words.none, panel);
      html("p", words.how, panel, "hint");
      if (pinned.size) list(words.pinned, [...pinned].filter(each => units.has(each)).map(each => ({key: each})));
      return;
    }
    const unit = units.get(key), node = nodes[unit.members[0]];
    html("h3", unit.kind === "group" ? unit.name : unit.kind === "token" ? node.text : unit.kind === "target" ? node.text : node.name, panel);
    if (unit.kind !== "group" && node.label) html("p", node.label, panel, "said-label");
    html("p", facts(unit, node), panel, "sum");
    const actions = html("div", "", panel, "actions");
    button(actions, pinned.has(key) ? "Unpin" : "Pin", () => pin(key));
    if (unit.kind === "group") button(actions, "Ungroup", () => { closed.delete(unit.name); pinned.delete(key); chosen = null; draw(); });
    list(words.inputs, into(key).map(link => ({key: link.source, weight: link.weight})));
    list(words.outputs, out(key).map(link => ({key: link.target, weight: link.weight})));
    if (unit.kind === "group") list(words.members, unit.members.map(id => ({id})));
    else if (node.card !== null) {
      card.hidden = false;
      card.innerHTML = cards[node.card];  // written with all text escaped
      card.prepend(html("h3", node.label || node.name, null));
    }
  }
  function facts(unit, node) {
    if (unit.kind === "group") return `supernode of ${unit.members.length} nodes`;
    const said = [node.kind === "token" ? `token, position ${node.position}` : node.kind === "target" ? "output" : `${kindOf(node)} ${place(node.position)}`];
    if (node.activation !== null) said.push(`activation ${number(node.activation)}`);
    if (node.probability !== null) said.push(`weight ${number(node.probability)}`);
    if (node.influence !== null && node.kind !== "target") said.push(`influence ${number(node.influence)}`);
    if (node.total !== null) said.push(`edges, bias ${signed(node.bias)} and others ${signed(node.others)} sum to ${number(node.total)}`);
    return said.join(" · ");
  }
  const button = (parent, text, act) => html("button", text, parent).addEventListener("click", act);

  function list(title, rows) {
    if (!rows.length) return;
    html("h4", title, panel);
    const found = html("ol", "", panel), most = Math.max(...rows.map(row => Math.abs(row.weight ?? 0)), 1e-12);
    for (const {key, id, weight} of rows.slice(0, LISTED)) {
      const unit = key === undefined ? null : units.get(key), node = nodes[id ?? unit.members[0]];
      const row = html("button", "", html("li", "", found)), who = html("span", "", row, "who");
      const name = unit?.kind === "group" ? unit.name : isEnd(node) ? node.text : node.label || node.name;
      html("span", `${name} `, who);
      if (!isEnd(node) && unit?.kind !== "group") html("small", tokens[node.position], who);
      const track = html("span", "", row, "track");
      track.hidden = weight === undefined;
      if (weight !== undefined) html("i", "", track).style.width = `${100 * Math.abs(weight) / most}%`;
      html("b", weight === undefined ? "" : signed(weight), row);
      row.classList.toggle("down", weight < 0);
      row.title = node.name;
      if (key !== undefined) row.addEventListener("click", () => go(key));
      else row.disabled = true;
    }
    if (rows.length > LISTED) html("p", `and ${rows.length - LISTED} weaker`, panel, "more");
  }

  // ---- what a reader does -----------------------------------------------------------------------------------------------

  function choose(key) {
    chosen = key;
    pointed = null;
    if (key !== null) live.textContent = label(units.get(key));
    focus();
  }
  function go(key) {
    choose(key);
    reach(key);
    element(key).focus({preventScroll: true});
    element(key).scrollIntoView({block: "nearest", inline: "nearest"});
  }
  function pin(key) {
    if (!pinned.delete(key)) pinned.add(key);
    if (!pinned.size) only.checked = false;
    live.textContent = pinned.has(key) ? `${units.get(key).name} is pinned` : `${units.get(key).name} is not pinned`;
    draw();
  }
  function groupPins() {
    if (groupButton.disabled) return;
    const of = [...pinned].filter(key => key[0] === "n").map(key => Number(key.slice(1))).filter(id => !isEnd(nodes[id]));
    let name = find(".group-name").value.trim() || `group ${closed.size + 1}`;
    while (closed.has(name)) name += "′";
    for (const [other, members] of closed) closed.set(other, members.filter(id => !of.includes(id)));
    closed.set(name, of);
    of.forEach(id => pinned.delete(`n${id}`));
    pinned.add(`g${name}`);
    collapse.checked = true;
    collapse.disabled = collapse.parentElement.hidden = false;
    find(".group-name").value = "";
    chosen = `g${name}`;
    draw();
  }
  function next(key, arrow) {  // the nearest unit in a direction
    const [along, across] = /Left|Right/.test(arrow) ? ["x", "y"] : ["y", "x"], sign = /Right|Down/.test(arrow) ? 1 : -1;
    const from = places.get(key);
    let best = null, cost = Infinity;
    for (const [other, to] of places) {
      const far = sign * (to[along] - from[along]), total = far + 3 * Math.abs(to[across] - from[across]);
      if (far > 0.5 && total < cost) [best, cost] = [other, total];
    }
    return best;
  }
  const unitAt = event => event.target.closest?.(".unit")?.dataset.unit ?? null;
  drawing.addEventListener("click", event => {
    const key = unitAt(event);
    if (key !== null) reach(key);
    if (key !== null && event.shiftKey) pin(key);
    else choose(key === chosen ? null : key);
  });
  drawing.addEventListener("pointerover", event => {
    if (event.pointerType === "touch") return;
    const key = unitAt(event);
    if (key !== pointed) { pointed = key; focus(); }
  });
  drawing.addEventListener("pointerleave", () => { pointed = null; focus(); });
  drawing.addEventListener("focusin", event => {
    const key = unitAt(event);
    if (key !== null) reach(key);
    if (key !== null && key !== chosen && element(key).matches(":focus-visible")) { pointed = key; focus(); }
  });
  drawing.addEventListener("keydown", event => {
    const key = unitAt(event);
    if (key === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const strongest = event.key === "i" ? into(key)[0]?.source : event.key === "o" ? out(key)[0]?.target : null;
    const to = /^Arrow/.test(event.key) ? next(key, event.key) : strongest;
    if (event.key === "Enter" || event.key === " ") choose(chosen === key ? null : key);
    else if (event.key === "Escape") choose(null);
    else if (event.key === "p") pin(key);
    else if (event.key === "g") groupPins();
    else if (to) element(to).focus();
    else if (!/^Arrow|^[io]$/.test(event.key)) return;
    event.preventDefault();
  });
  range.addEventListener("input", draw);
  for (const box of [only, collapse]) box.addEventListener("change", draw);
  groupButton.addEventListener("click", groupPins);
  clear.addEventListener("click", () => { pinned.clear(); only.checked = false; draw(); });
  collapse.disabled = !closed.size;
  let wide = 0;
  new ResizeObserver(() => {
    if (drawing.clientWidth === wide) return;
    const isFirst = !wide;
    wide = drawing.clientWidth;
    draw();
    if (isFirst) drawing.scrollLeft = drawing.scrollWidth;  // to the outputs
  }).observe(drawing);
}
