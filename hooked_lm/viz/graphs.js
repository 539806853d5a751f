// A node is chosen with a click, or with the arrow keys and Enter: its edges are shown alone, and listed. Escape ends that.

const MOST = 14;  // rows of a list

for (const graph of document.querySelectorAll(".graph")) {
  const {edges, value} = JSON.parse(graph.querySelector("script.data").textContent);
  const drawings = [...graph.querySelectorAll(".drawn > svg")], panel = graph.querySelector(".chosen");
  const hint = panel.innerHTML, called = node => node.dataset.node;
  const nodes = drawings.flatMap(drawing => [...drawing.querySelectorAll(".node")]);
  let chosen = null;

  const reads = name => edges.filter(edge => edge[1] === name), writes = name => edges.filter(edge => edge[0] === name);
  const element = (kind, text, parent) => {
    const found = document.createElement(kind);
    found.textContent = text;
    parent.append(found);
    return found;
  };
  const list = (title, some, other) => {
    if (!some.length) return;
    element("h4", title, panel);
    const table = element("table", "", panel);
    for (const edge of some.slice(0, MOST)) {
      const row = table.insertRow(), [, target, port, score, drawn] = edge;
      if (!drawn) row.className = "weak";
      const into = port && (other === 0 ? `into ${port}` : `its ${port}`);
      for (const text of [edge[other], into, score]) row.insertCell().textContent = text;
    }
    if (some.length > MOST) element("p", `and ${some.length - MOST} more`, panel).className = "hint";
  };
  const show = name => {
    chosen = name;
    panel.replaceChildren();
    if (name === null) panel.innerHTML = hint;
    else {
      element("h3", name, panel);
      list(`reads, with ${value}`, reads(name), 0);
      list(`writes, with ${value}`, writes(name), 1);
      if (panel.querySelector(".weak")) element("p", "Grey: weaker edges, drawn only here.", panel).className = "hint";
    }
    const beside = new Set([name, ...reads(name).map(edge => edge[0]), ...writes(name).map(edge => edge[1])]);
    for (const drawing of drawings) drawing.classList.toggle("some", name !== null);
    for (const node of nodes) {
      node.classList.toggle("on", beside.has(called(node)));
      node.classList.toggle("self", called(node) === name);
      node.setAttribute("aria-pressed", called(node) === name);
    }
    for (const line of graph.querySelectorAll(".edge"))
      line.classList.toggle("on", edges[line.dataset.edge].slice(0, 2).includes(name));
  };
  const reach = node => nodes.forEach(each => each.tabIndex = called(each) === called(node) ? 0 : -1);
  const place = node => {
    const box = node.querySelector(".box").getBoundingClientRect();
    return {x: box.x + box.width / 2, y: box.y + box.height / 2};
  };
  const next = (node, key) => {  // the nearest node in a direction
    const [along, across] = /Left|Right/.test(key) ? ["x", "y"] : ["y", "x"], sign = /Right|Down/.test(key) ? 1 : -1;
    const from = place(node);
    return nodes.filter(each => each.ownerSVGElement === node.ownerSVGElement).reduce((found, each) => {
      const to = place(each), far = sign * (to[along] - from[along]), cost = far + 3 * Math.abs(to[across] - from[across]);
      return far > 0.5 && cost < found.cost ? {each, cost} : found;
    }, {each: null, cost: Infinity}).each;
  };
  for (const node of nodes) {
    const name = called(node), count = (some, word) => `${word} ${some.length} edge${some.length === 1 ? "" : "s"}`;
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", `${name}: ${count(reads(name), "reads")}, ${count(writes(name), "writes")}`);
    const toggle = () => show(chosen === name ? null : name);
    node.addEventListener("click", () => { reach(node); toggle(); });
    node.addEventListener("focus", () => reach(node));
    node.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") toggle();
      else if (event.key === "Escape") show(null);
      else if (/^Arrow/.test(event.key)) (next(node, event.key) || node).focus();
      else return;
      event.preventDefault();
    });
  }
  if (nodes.length) reach(nodes[0]);
  show(null);
}
