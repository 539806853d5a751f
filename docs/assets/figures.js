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
    const titled = (part) => {
      const title = typeof part.title === "string" ? { text: part.title } : part.title || {};
      return { ...title, font: { ...(title.font || {}), color: ink } };
    };
    for (const key of Object.keys(changed)) {
      const part = changed[key];
      if (/^[xy]axis/.test(key)) {
        const tickfont = { ...(part.tickfont || {}), color: ink };
        const gridcolor = dark() ? "#3b4252" : part.gridcolor;
        changed[key] = { ...part, color: ink, tickfont, gridcolor, title: titled(part) };
      } else if (/^coloraxis/.test(key)) {
        changed[key] = { ...part, colorbar: bar(part.colorbar || {}) };
      }
    }
    function bar(part) {
      return { ...part, tickfont: { ...(part.tickfont || {}), color: ink }, title: titled(part) };
    }
    for (const note of changed.annotations || []) {
      if (note.font && note.font.color) note.font.color = ink;
    }
    if (changed.title && changed.title.font) changed.title.font.color = ink;
    changed.autosize = true;
    delete changed.width;
    return changed;
  }

  function traces(given) {
    const ink = dark() ? "#e6e8ec" : "#1f2937";
    return (given.data || []).map((trace) => {
      if (!trace.colorbar) return trace;
      const title = typeof trace.colorbar.title === "string" ? { text: trace.colorbar.title } : trace.colorbar.title || {};
      const colorbar = { ...trace.colorbar, tickfont: { color: ink }, title: { ...title, font: { color: ink } } };
      return { ...trace, colorbar };
    });
  }

  function draw() {
    for (const { element, given } of figures) {
      Plotly.react(element, traces(given), layout(given.layout || {}), { responsive: true, displayModeBar: false });
    }
  }

  draw();
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
})();
