// Draws the plotly figures of a page in the colours of the palette that is chosen, and again when that changes.
(function () {
  const figures = [...document.querySelectorAll(".plotly-figure")].map((element) => ({
    element,
    given: JSON.parse(element.dataset.figure),
  }));
  const dark = () => document.body.dataset.mdColorScheme === "slate";

  function layout(given) {
    const ink = dark() ? "#e6e8ec" : "#1f2937";
    const changed = structuredClone(given);
    changed.paper_bgcolor = "rgba(0,0,0,0)";
    changed.plot_bgcolor = dark() ? "rgba(255,255,255,0.04)" : changed.plot_bgcolor;
    changed.font = { ...(changed.font || {}), color: ink };
    for (const key of Object.keys(changed)) {
      if (/^[xy]axis/.test(key)) {
        changed[key] = { ...changed[key], color: ink, gridcolor: dark() ? "#3b4252" : changed[key].gridcolor };
      }
    }
    for (const note of changed.annotations || []) {
      if (note.font && note.font.color) note.font.color = ink;
    }
    if (changed.title && changed.title.font) changed.title.font.color = ink;
    changed.autosize = true;
    delete changed.width;
    return changed;
  }

  function draw() {
    for (const { element, given } of figures) {
      Plotly.react(element, given.data, layout(given.layout || {}), { responsive: true, displayModeBar: false });
    }
  }

  draw();
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
})();
