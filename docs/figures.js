// Draws the figures of a page in the colours of the palette that is chosen, and again when that changes. The build puts the script
// and the colours of the package's own pages before this one: `draw`, `hearKeys`, `figureColours`.
{
  const places = [...document.querySelectorAll(".plotly-figure")];
  const figures = places.map(place => JSON.parse(place.dataset.figure));
  const redraw = () => {
    const colours = figureColours[document.body.dataset.mdColorScheme === "slate" ? "dark" : "light"];
    places.forEach((place, i) => draw(place, figures[i], colours));
  };
  places.forEach((place, i) => { place.style.minWidth = `${(figures[i].layout.meta || {}).min_width || 0}px`; });
  redraw();
  places.forEach(hearKeys);
  new MutationObserver(redraw).observe(document.body, {attributes: true, attributeFilter: ["data-md-color-scheme"]});
}
