// Draws the figures of a page in the colours that the reader prefers.

function repainted(value, colours, isColour = false) {
  // A copy of a part of a figure in which colours have their counterparts; numbers and texts are the same objects.
  if (typeof value === "string") return isColour && colours[value.toLowerCase()] || value;
  if (Array.isArray(value)) {
    if (typeof value[0] === "number" && !(isColour && typeof value[1] === "string")) return value;
    const stop = isColour && value.length === 2 && typeof value[0] === "number" && colours[`${value[0]} ${value[1]}`];
    return stop ? [value[0], stop] : value.map(part => repainted(part, colours, isColour));
  }
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) =>
    [key, repainted(part, colours, isColour && key !== "bdata" || /colou?rs?(cale)?$/.test(key))]));
}

function lines(text, letters) {  // a text as lines of at most so many letters, broken between words
  const found = [""];
  for (const word of (text || "").split(" ")) {
    const last = found[found.length - 1];
    if (last && last.length + word.length >= letters) found.push(word);
    else found[found.length - 1] = last ? `${last} ${word}` : word;
  }
  return found;
}

function fitted(layout, width) {  // the layout with its title in as many lines as a narrow figure needs
  const {title, margin} = layout;
  if (!title || !margin) return layout;
  const room = width - 24, below = title.subtitle && title.subtitle.text;
  const parts = [lines(title.text, room / 8), lines(below, room / 6.3)];
  const more = 18 * (parts[0].length - 1) + 16 * (parts[1].length - 1);
  if (!more) return layout;
  const texts = {text: parts[0].join("<br>"), subtitle: {...title.subtitle, text: parts[1].join("<br>")}};
  const at = title.y === undefined ? {y: 1, yref: "container", yanchor: "top", pad: {...title.pad, t: 14}} : {};
  return {...layout, title: {...title, ...texts, ...at}, height: layout.height + more, margin: {...margin, t: margin.t + more}};
}

function dimmed(trace, shift) {  // a pale image for the paper of these colours
  if (trace.type !== "image" || !trace.meta || !trace.meta.pale || !shift) return trace;
  const bytes = Array.from(atob(trace.z.bdata), letter => String.fromCharCode(letter.charCodeAt(0) + shift));
  return {...trace, z: {...trace.z, bdata: btoa(bytes.join(""))}};
}

function draw(place, figure, colours) {
  const data = repainted(figure.data, colours).map(trace => dimmed(trace, Number(colours.pale)));
  const shown = {data, layout: repainted(figure.layout, colours)};
  const seen = place.parentElement.clientWidth;  // a wider figure is moved sideways, but its title is seen at once
  const layout = fitted(shown.layout, Math.min(shown.layout.width || place.clientWidth, seen));
  return Plotly.react(place, structuredClone(shown.data), structuredClone(layout), {
    displaylogo: false, displayModeBar: false, responsive: true});
}

// ---- the keyboard: arrow keys move among the values of a figure, and what they say is read aloud ----

function values(place) {  // everything that says something on hover, with its place in pixels
  const found = [], layout = place._fullLayout;
  place._fullData.forEach((trace, curveNumber) => {
    if (trace.hoverinfo === "skip" || !trace.xaxis) return;
    const [across, down] = [layout[trace.xaxis.replace("x", "xaxis")], layout[trace.yaxis.replace("y", "yaxis")]];
    const add = (x, y, pointNumber) => {
      const at = {x: across._offset + across.d2p(x), y: down._offset + down.d2p(y)};
      if (Number.isFinite(at.x + at.y))
        found.push({...at, curveNumber, pointNumber, data: {xval: x, yval: y}, subplot: trace.xaxis + trace.yaxis, kind: trace.mode});
    };
    const there = value => value !== null && !Number.isNaN(value);
    if (trace.type === "heatmap")
      trace.z.forEach((row, i) => row.forEach((value, k) => there(value) && add(k, i, [i, k])));
    else if (trace.type === "bar")
      trace.x.forEach((x, i) => trace.orientation === "h" ? there(x) && add(0, trace.y[i], i) : there(trace.y[i]) && add(x, trace.base || 0, i));
    else if (trace.type === "scatter") trace.x.forEach((x, i) => there(trace.y[i]) && add(x, trace.y[i], i));
  });
  return found;
}

function next(all, from, key) {  // the nearest value in a direction: of the same trace, or of any
  const [along, beside] = /Left|Right/.test(key) ? ["x", "y"] : ["y", "x"], sign = /Right|Down/.test(key) ? 1 : -1;
  const best = (some, weight) => some.reduce((found, each) => {
    const far = sign * (each[along] - from[along]), cost = far + weight * Math.abs(each[beside] - from[beside]);
    return far > 0.5 && cost < found.cost ? {each, cost} : found;
  }, {each: null, cost: Infinity}).each;
  const isGraph = from.kind === "markers";
  return best(all.filter(each => each.curveNumber === from.curveNumber), isGraph ? 3 : 0.001) || best(all, 3);
}

function hearKeys(place) {
  const said = document.createElement("div");
  said.className = "said";
  said.setAttribute("role", "status");
  place.after(said);
  place.tabIndex = 0;
  place.setAttribute("aria-description", "Arrow keys move among the values.");
  let at = null;
  const show = value => {
    at = value;
    Plotly.Fx.hover(place, at.data, at.subplot);
    setTimeout(() => {  // plotly waits between two hovers
      const texts = [...place.querySelectorAll(".hoverlayer .hovertext text")].map(text =>
        [...text.querySelectorAll("tspan.line")].map(line => line.textContent).join(", ") || text.textContent);
      said.textContent = texts.filter(Boolean).join(", ");
    }, 80);
  };
  place.addEventListener("keydown", event => {
    if (event.key === "Escape") return Plotly.Fx.unhover(place);
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) return;
    const all = values(place);
    if (!all.length) return;
    event.preventDefault();
    const old = at && all.find(each => each.curveNumber === at.curveNumber && String(each.pointNumber) === String(at.pointNumber));
    const ends = {Home: all[0], End: all[all.length - 1]};
    show(ends[event.key] || (old ? next(all, old, event.key) || old : all[0]));
  });
  place.addEventListener("blur", () => Plotly.Fx.unhover(place));
}

async function drawAll(colours) {
  const places = [...document.querySelectorAll("[data-figure]")];
  if (!places.length) return;
  try {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(await unpacked(document.getElementById("plotly").textContent));
    document.head.append(script);
  } catch (error) {
    for (const place of places) place.textContent = `This figure cannot be drawn. ${error.message}`;
    return;
  }
  const figures = places.map(place => JSON.parse(document.getElementById(place.dataset.figure).textContent));
  const preference = matchMedia("(prefers-color-scheme: dark)"), printing = matchMedia("print");
  const redraw = () => Promise.all(places.map((place, i) =>
    draw(place, figures[i], preference.matches && !printing.matches ? colours.dark : colours.light)));
  preference.addEventListener("change", redraw);
  printing.addEventListener("change", redraw);
  await redraw();
  places.forEach(hearKeys);
  document.documentElement.dataset.drawn = places.length;
}
