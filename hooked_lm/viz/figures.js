// Draws the figures of a page, in the colours that the reader prefers, and gives frames the heights of their views.

function repainted(value, colours, isColour = false) {
  // A copy of a part of a figure in which colours have their dark counterparts; numbers and texts are the same objects.
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

function draw(place, figure, dark) {
  const shown = dark ? {data: repainted(figure.data, dark), layout: repainted(figure.layout, dark)} : figure;
  const layout = fitted(shown.layout, shown.layout.width || place.clientWidth);
  return Plotly.react(place, structuredClone(shown.data), structuredClone(layout), {
    displaylogo: false, displayModeBar: false, responsive: true});
}

async function drawAll(dark) {
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
    draw(place, figures[i], preference.matches && !printing.matches && dark)));
  preference.addEventListener("change", redraw);
  printing.addEventListener("change", redraw);
  await redraw();
  document.documentElement.dataset.drawn = places.length;
}

addEventListener("message", event => {
  const frame = [...document.querySelectorAll("iframe.view")].find(each => each.contentWindow === event.source);
  const height = Number(event.data && event.data.hookedViewHeight);
  if (frame && height > 0) frame.style.height = `${Math.min(height, 20000)}px`;
});
