// The attention view: a head picker, a heat map of one head, and the text with where a token looks. No library.
(() => {
  const THUMB = 32, LARGEST_CELL = 34, TALLEST = 600, TOP = 8, FEWEST = 8, ZOOMED = 48, TITLE = 16;
  const MINUS = "\u2212";
  const dark = matchMedia("(prefers-color-scheme: dark)");

  document.querySelectorAll(".attention:not([data-open])").forEach((root) => {
    root.dataset.open = "";
    open(root).catch((error) => {
      root.querySelector(".opening").textContent = `This view cannot be drawn: ${error.message}`;
    });
  });

  async function open(root) {
    const meta = JSON.parse(root.querySelector(".meta").textContent);
    const buffer = await unpacked(root.querySelector(".data").textContent.trim());
    draw(root, meta, meta.bits === 16 ? new Uint16Array(buffer) : new Uint8Array(buffer));
  }

  // 256 colours between stops [place, "#rrggbb"], as [r, g, b]
  function palette(stops) {
    const parts = stops.map(([place, hex]) => [place, [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16))]);
    return Array.from({ length: 256 }, (_, i) => {
      const at = i / 255, next = Math.max(1, parts.findIndex(([place]) => place >= at));
      const [from, first] = parts[next - 1], [to, last] = parts[next];
      return first.map((c, j) => Math.round(c + ((last[j] - c) * (at - from)) / (to - from)));
    });
  }

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function draw(root, meta, data) {
    const $ = (css) => root.querySelector(css);
    const { queries, heads, causal, low, step, signed } = meta;
    const crossed = meta.keys !== null, keys = crossed ? meta.keys : queries;
    const nq = queries.length, nk = keys.length, missing = 2 ** meta.bits - 1;
    const square = (root) => root * Math.abs(root), full = Math.max(square(low + step * (missing - 1)), -square(low)), least = (step / 2) ** 2;
    const size = causal ? (nq * (nq + 1)) / 2 : nq * nk;
    const decimals = meta.bits === 16 ? 3 : 2;
    const state = { head: meta.start, side: "query", token: nq - 1, held: false, hide: false, stretch: meta.stretch, q: nq - 1, k: 0, cell: false };
    const view = { q: 0, k: 0, rows: nq, columns: nk };  // what of the matrix is shown
    let colours, geometry = null, painted = null;

    const code = (h, q, k) => (causal ? data[h * size + (q * (q + 1)) / 2 + k] : data[h * size + q * nk + k]);
    // NaN: missing. Cells above the diagonal of a causal head are zero.
    function value(h, q, k) {
      if (causal && k > q) return 0;
      const c = code(h, q, k);
      return c === missing ? NaN : square(low + c * step);
    }
    function strongest(h, q) {  // the key, other than the first, at which a query looks most; the first if it looks at no other
      let best = 0;
      for (let k = 1; k < nk; k++)
        if (Math.abs(value(h, q, k)) > (best ? Math.abs(value(h, q, best)) : least)) best = k;
      return best;
    }
    const shown = (h, q, k) => (state.hide && k === 0 ? 0 : value(h, q, k));
    const digits = (v) => (decimals === 2 && Math.abs(v) < 0.1 && Math.abs(v) > 1e-4 ? v.toPrecision(2) : v.toFixed(decimals));
    const number = (v) => (Number.isNaN(v) ? "no value" : digits(v).replace(/^-(0\.?0*)$/, "$1").replace("-", MINUS));
    const named = (tokens, i) => `${tokens[i]} (${i})`;

    const limit = (h = state.head) => (state.stretch ? meta.limits[h] : full) || 1;
    // Of each block of the shown cells the value that is farthest from 0: as many blocks as pixels, so none is lost.
    function blocks(h, wide, tall, { q: top, k: left, rows, columns }) {
      const most = new Float32Array(wide * tall).fill(NaN);
      for (let q = top; q < top + rows; q++) {
        const line = Math.floor(((q - top) * tall) / rows) * wide;
        for (let k = left; k < left + columns; k++) {
          const v = shown(h, q, k), at = line + Math.floor(((k - left) * wide) / columns);
          if (Number.isNaN(most[at]) || Math.abs(v) > Math.abs(most[at])) most[at] = v;
        }
      }
      return most;
    }
    function shade(v, most) {
      const t = signed ? (v / most + 1) / 2 : v / most;
      return colours[Math.max(0, Math.min(255, Math.round(255 * t)))];
    }
    const css = (rgb) => `rgb(${rgb.join(",")})`;
    const ink = (rgb) => (rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 140 ? "#10151d" : "#ffffff");

    // ---- the head picker ----
    const radios = [];
    function buildPicker() {
      const rows = new Map();
      heads.forEach((head, h) => {
        if (!rows.has(head.layer)) rows.set(head.layer, []);
        rows.get(head.layer).push(h);
      });
      const layers = [...rows.keys()].sort((a, b) => b - a);
      state.rows = layers.map((layer) => rows.get(layer).sort((a, b) => heads[a].head - heads[b].head));
      state.rows.forEach((row, i) => {
        const line = element("div", { class: "layer" }), buttons = element("div");
        if (layers[i] !== null) line.append(element("span", { class: "layer-name" }, `L${layers[i]}`));
        line.append(buttons);
        for (const h of row) {
          const canvas = element("canvas", { "aria-hidden": "true" });
          const radio = element("button", { type: "button", role: "radio", "aria-label": heads[h].label, title: heads[h].label });
          radio.append(canvas, element("span", {}, `H${heads[h].head}`));
          radio.addEventListener("click", () => pick(h));
          radios[h] = radio;
          buttons.append(radio);
        }
        $(".heads").append(line);
      });
      $(".heads").addEventListener("keydown", (event) => {
        const row = state.rows.findIndex((some) => some.includes(state.head)), column = state.rows[row].indexOf(state.head);
        const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
        const move = moves[event.key];
        if (!move) return;
        event.preventDefault();
        const next = state.rows[Math.max(0, Math.min(state.rows.length - 1, row + move[0]))];
        pick(next[Math.max(0, Math.min(next.length - 1, column + move[1]))], true);
      });
    }
    function thumbnail(h) {
      const canvas = radios[h].firstChild, wide = Math.min(nk, THUMB), tall = Math.min(nq, THUMB);
      canvas.width = wide;
      canvas.height = tall;
      paint(canvas.getContext("2d"), wide, tall, blocks(h, wide, tall, { q: 0, k: 0, rows: nq, columns: nk }), limit(h));
    }
    function spread() {  // each layer in rows of equally many heads
      const box = $(".heads"), some = box.querySelector("button"), { width } = some.getBoundingClientRect();
      const gap = parseFloat(getComputedStyle(some.parentElement).columnGap) || 0;
      const name = box.querySelector(".layer-name"), beside = name ? name.offsetWidth + 4 : 0;
      const most = Math.max(1, Math.floor((box.clientWidth - 6 - beside + gap) / (width + gap)));
      box.querySelectorAll(".layer > div").forEach((line) => {
        const n = line.children.length, across = Math.ceil(n / Math.ceil(n / most));
        line.style.maxWidth = `${Math.ceil(across * (width + gap) - gap) + 0.5}px`;
      });
    }
    let round = 0;
    function thumbnails() {
      const mine = ++round;
      (function some(from) {
        if (mine !== round) return;
        const until = Math.min(heads.length, from + Math.max(1, Math.floor(2e6 / size)));
        for (let h = from; h < until; h++) thumbnail(h);
        if (until < heads.length) requestAnimationFrame(() => some(until));
        else root.dataset.thumbnails = "done";
      })(0);
    }
    function point(q) {  // the marked cell: until one is chosen, the strongest of the row
      state.q = q;
      if (!state.cell) state.k = strongest(state.head, q);
    }
    function reveal() {  // the layer of the chosen head, in the list
      const box = $(".heads"), { offsetTop: top, offsetHeight: height } = radios[state.head].closest(".layer");
      box.scrollTop = Math.max(Math.min(box.scrollTop, top), top + height - box.clientHeight);
    }
    function pick(h, focus = false) {
      state.head = h;
      point(state.q);
      radios.forEach((radio, i) => {
        radio.setAttribute("aria-checked", i === h);
        radio.tabIndex = i === h ? 0 : -1;
      });
      reveal();
      if (focus) radios[h].focus({ preventScroll: true });
      $(".name").textContent = heads[h].label;
      drawMap();
      drawText();
    }

    // ---- the heat map ----
    const rgbOf = (name) => [1, 3, 5].map((i) => parseInt(getComputedStyle(root).getPropertyValue(name).trim().slice(i, i + 2), 16));
    function paint(context, wide, tall, of, most) {
      const image = context.createImageData(wide, tall), blank = rgbOf("--line"), stroke = rgbOf("--faint");
      for (let q = 0, at = 0; q < tall; q++) for (let k = 0; k < wide; k++, at += 4) {
        const v = of[q * wide + k], rgb = Number.isNaN(v) ? ((q + k) % 4 ? blank : stroke) : shade(v, most);
        image.data[at] = rgb[0]; image.data[at + 1] = rgb[1]; image.data[at + 2] = rgb[2]; image.data[at + 3] = 255;
      }
      context.putImageData(image, 0, 0);
    }
    function drawMap() {
      const canvas = $("canvas[role=application]"), context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
      const style = getComputedStyle(root), width = Math.floor($(".frame").clientWidth);
      if (!width) return;  // hidden: it is drawn as soon as it has a width
      context.font = `12px ${style.fontFamily}`;
      const longest = (tokens) => Math.min(width < 480 ? 92 : 110, Math.max(...tokens.map((t) => context.measureText(t).width)));
      const left = Math.ceil(longest(queries)) + 10 + TITLE, top = Math.ceil(longest(keys) * 0.87) + 16 + TITLE;
      const right = Math.ceil(longest(keys.slice(-4)) * 0.5) + 4, { rows, columns } = view;
      let across = Math.min(LARGEST_CELL, (width - left - right) / columns), down = Math.min(LARGEST_CELL, TALLEST / rows);
      if (!crossed) across = down = Math.min(across, down);
      geometry = { left, top, across, down };
      const height = Math.ceil(top + down * rows + 2);
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      context.scale(ratio, ratio);
      const most = limit(), h = state.head;
      const wide = Math.min(columns, Math.ceil(across * columns * ratio)), tall = Math.min(rows, Math.ceil(down * rows * ratio));
      const what = [h, most, state.hide, dark.matches, wide, tall, ...Object.values(view)].join();
      if (!painted || painted.what !== what) {  // the pointer moves often, and the cells are many
        const small = element("canvas", { width: wide, height: tall }), of = blocks(h, wide, tall, view);
        paint(small.getContext("2d"), wide, tall, of, most);
        painted = { what, small, of };
      }
      context.imageSmoothingEnabled = false;
      context.drawImage(painted.small, left, top, across * columns, down * rows);
      hatch(context, style, painted.of, wide, tall);
      if (Math.min(across, down) > 8) grid(context, style);
      context.strokeStyle = style.getPropertyValue("--line");
      context.strokeRect(left - 0.5, top - 0.5, across * columns + 1, down * rows + 1);
      labels(context, style);
      $(".low").textContent = signed ? number(-most) : number(0);
      $(".high").textContent = number(most) + (state.stretch ? " or more" : "");
      $(".ramp").style.background = `linear-gradient(to right, ${[0, 64, 128, 191, 255].map((i) => css(colours[i])).join(",")})`;
      mark(context, style);
      read();
    }
    function hatch(context, style, of, wide, tall) {  // the runs of cells without a value in each row
      const { left, top } = geometry, across = (geometry.across * view.columns) / wide, down = (geometry.down * view.rows) / tall;
      const tile = element("canvas");
      tile.width = tile.height = 6;
      const pen = tile.getContext("2d");
      pen.fillStyle = style.getPropertyValue("--line");
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = style.getPropertyValue("--faint");
      for (const shift of [-6, 0, 6]) { pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); }
      pen.stroke();
      context.fillStyle = context.createPattern(tile, "repeat");
      for (let q = 0; q < tall; q++) for (let k = 0, from = 0; k < wide; k = from) {
        for (from = k; from < wide && Number.isNaN(of[q * wide + from]);) from++;
        if (from > k) context.fillRect(left + k * across, top + q * down, (from - k) * across, down);
        else from++;
      }
    }
    function grid(context, style) {
      const { left, top, across, down } = geometry;
      context.strokeStyle = style.getPropertyValue("--line");
      context.lineWidth = 1;
      context.beginPath();
      const { rows, columns } = view;
      for (let k = 1; k < columns; k++) { context.moveTo(left + k * across, top); context.lineTo(left + k * across, top + rows * down); }
      for (let q = 1; q < rows; q++) { context.moveTo(left, top + q * down); context.lineTo(left + columns * across, top + q * down); }
      context.stroke();
    }
    function labels(context, style) {
      const { left, top, across, down } = geometry;
      const cut = (text, most) => {
        if (context.measureText(text).width <= most) return text;
        let some = text;
        while (some && context.measureText(`${some}\u2026`).width > most) some = some.slice(0, -1);
        return `${some}\u2026`;
      };
      context.font = `12px ${style.fontFamily}`;
      context.textBaseline = "middle";
      const every = (cell) => Math.ceil(13 / cell);
      const row = state.q, column = state.k;
      context.textAlign = "center";
      context.fillStyle = style.getPropertyValue("--faint");
      context.fillText("key", left + (view.columns * across) / 2, 8);
      context.save();
      context.translate(8, top + (view.rows * down) / 2);
      context.rotate(-Math.PI / 2);
      context.fillText("query", 0, 0);
      context.restore();
      context.textAlign = "right";
      for (let q = view.q; q < view.q + view.rows; q += every(down)) {
        context.fillStyle = style.getPropertyValue(q === row ? "--ink" : "--faint");
        context.fillText(cut(queries[q], left - 8 - TITLE), left - 6, top + (q - view.q + 0.5) * down);
      }
      context.textAlign = "left";
      for (let k = view.k; k < view.k + view.columns; k += every(across)) {
        context.save();
        context.translate(left + (k - view.k + 0.5) * across, top - 6);
        context.rotate(-Math.PI / 3);
        context.fillStyle = style.getPropertyValue(k === column ? "--ink" : "--faint");
        context.fillText(cut(keys[k], (top - 12 - TITLE) / 0.87), 0, 0);
        context.restore();
      }
    }
    function mark(context, style) {
      const { left, top, across, down } = geometry, [q, k] = [state.q - view.q, state.k - view.k];
      if (q < 0 || q >= view.rows || k < 0 || k >= view.columns) return;
      context.strokeStyle = style.getPropertyValue("--marker");
      context.lineWidth = 2;
      context.strokeRect(left + k * across, top + q * down, Math.max(3, across), Math.max(3, down));
    }
    function sentence(q, k) {
      const v = value(state.head, q, k), hidden = state.hide && k === 0 ? " (hidden)" : "";
      const out = meta.kept !== null && v === 0 && !(causal && k > q) ? " or left out" : "";
      return `${named(queries, q)} \u2192 ${named(keys, k)}: ${number(v)}${out}${hidden}`;
    }
    function read() {
      $(".reading").textContent = `${heads[state.head].label}: ${sentence(state.q, state.k)}`;
    }
    function cellAt(event) {
      const box = $("canvas[role=application]").getBoundingClientRect(), { left, top, across, down } = geometry;
      const at = [(event.clientY - box.top - top) / down, (event.clientX - box.left - left) / across];
      const [q, k] = at.map(Math.floor);
      if (q < 0 || q >= view.rows || k < 0 || k >= view.columns) return null;
      let best = [view.q + q, view.k + k];
      if (Math.max(1 / across, 1 / down) > 1)  // of the cells below the pointer the one whose colour is seen
        for (let i = view.q + q; i < Math.min(nq, view.q + q + 1 / down); i++) for (let j = view.k + k; j < Math.min(nk, view.k + k + 1 / across); j++)
          if (Math.abs(shown(state.head, i, j)) > Math.abs(shown(state.head, ...best))) best = [i, j];
      return best;
    }
    function look(q, k, rows, columns) {  // at a part of the matrix, or all of it
      view.rows = Math.max(Math.min(FEWEST, nq), Math.min(nq, Math.round(rows)));
      view.columns = Math.max(Math.min(FEWEST, nk), Math.min(nk, Math.round(columns)));
      view.q = Math.max(0, Math.min(nq - view.rows, Math.round(q)));
      view.k = Math.max(0, Math.min(nk - view.columns, Math.round(k)));
      drawMap();
      tellHeight();
    }
    function zoom(factor) {  // around the marked cell
      const rows = view.rows * factor, columns = view.columns * factor;
      look(state.q - rows / 2, state.k - columns / 2, rows, columns);
    }
    function listenToMap() {
      const canvas = $("canvas[role=application]"), tip = $(".tip");
      let from = null, dragged = false;
      canvas.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? event : null; dragged = false; });
      addEventListener("pointerup", (event) => {
        const start = from, one = start && cellAt(start), other = start && cellAt(event);
        from = null;
        if (!dragged || !one || !other) return;
        const [q, k] = [0, 1].map((i) => Math.min(one[i], other[i]));
        look(q, k, Math.abs(one[0] - other[0]) + 1, Math.abs(one[1] - other[1]) + 1);
      });
      canvas.addEventListener("pointermove", (event) => {
        const cell = cellAt(event);
        tip.hidden = cell === null;
        if (cell === null) return;
        [state.q, state.k] = cell;
        state.cell = true;
        tip.textContent = sentence(...cell);
        const box = $(".frame").getBoundingClientRect();
        const x = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
        tip.style.transform = `translate(${Math.max(0, x)}px, ${event.clientY - box.top + 16}px)`;
        drawMap();
        if (from && Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > 5) {
          dragged = true;
          const frame = canvas.getBoundingClientRect(), context = canvas.getContext("2d");
          context.strokeStyle = getComputedStyle(root).getPropertyValue("--ink");
          context.strokeRect(from.clientX - frame.left, from.clientY - frame.top, event.clientX - from.clientX, event.clientY - from.clientY);
        }
      });
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      canvas.addEventListener("click", (event) => {
        const cell = dragged ? null : cellAt(event);
        if (cell) { state.held = true; select("query", cell[0]); }
      });
      canvas.addEventListener("keydown", (event) => {
        const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
        if (factor && !event.ctrlKey && !event.metaKey) zoom(factor);
        const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (!move) return;
        event.preventDefault();
        state.cell = true;
        state.q = Math.max(0, Math.min(nq - 1, state.q + move[0]));
        state.k = Math.max(0, Math.min(nk - 1, state.k + move[1]));
        look(Math.max(Math.min(view.q, state.q), state.q - view.rows + 1), Math.max(Math.min(view.k, state.k), state.k - view.columns + 1), view.rows, view.columns);
      });
      $(".zoom").hidden = Math.max(nq, nk) <= ZOOMED;
      $(".closer").addEventListener("click", () => zoom(0.5));
      $(".wider").addEventListener("click", () => zoom(2));
    }

    // ---- the text ----
    const spans = { query: [], key: [] };
    function buildText() {
      const sides = crossed ? [["query", queries, "Queries"], ["key", keys, "Keys"]] : [["query", queries, "Text"]];
      for (const [side, tokens, title] of sides) {
        const box = element("div", { class: "text", role: "listbox", "aria-label": `${title}: choose a token` });
        tokens.forEach((token, i) => {
          const span = element("span", { role: "option", "data-i": i }, token);
          span.addEventListener("pointerenter", () => { if (!state.held) select(side, i); });
          span.addEventListener("click", () => { state.held = !(state.held && state.token === i && state.side === side); select(side, i); });
          span.addEventListener("focus", () => { if (state.token !== i || state.side !== side) select(side, i); });
          spans[side].push(span);
          box.append(span);
          if (token.endsWith("\u21b5")) box.append(element("br"));
        });
        box.addEventListener("keydown", (event) => {
          const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -tokens.length, End: tokens.length }[event.key];
          if (event.key === "Escape") { state.held = false; drawText(); }
          if (!move) return;
          event.preventDefault();
          const from = state.side === side ? state.token : 0;
          spans[side][Math.max(0, Math.min(tokens.length - 1, from + move))].focus();
        });
        $(".texts").append(element("h2", {}, title), box);
      }
      if (!crossed) spans.key = spans.query;
    }
    function select(side, i) {
      state.side = side;
      state.token = i;
      if (side === "query" || !crossed) point(i);
      else state.k = i;
      drawText();
      drawMap();
    }
    function drawText() {
      const { head: h, token: i, side } = state, most = limit(), plain = css(colours[signed ? 128 : 0]);
      const all = new Set([...spans.query, ...spans.key]);
      for (const span of all) {
        span.style.background = "";
        span.style.color = "";
        span.style.boxShadow = "";
        span.classList.remove("missing");
        span.tabIndex = -1;
        span.setAttribute("aria-selected", "false");
        span.classList.remove("held");
      }
      const looks = !crossed || side === "query", seen = !crossed || side === "key";
      if (looks) for (let k = 0; k < nk; k++) {
        const v = shown(h, i, k), rgb = shade(v, most);
        spans.key[k].classList.toggle("missing", Number.isNaN(v));
        if (Math.abs(v) > most * 0.01) {
          spans.key[k].style.background = css(rgb);
          spans.key[k].style.color = ink(rgb);
        }
      }
      if (seen) for (let q = 0; q < nq; q++) {
        const v = Math.abs(shown(h, q, i));
        if (v > most * 0.01) spans.query[q].style.boxShadow = `inset 0 -${Math.round(1 + 4 * Math.min(1, v / most))}px var(--down)`;
      }
      const own = spans[side][i];
      own.setAttribute("aria-selected", "true");
      own.classList.toggle("held", state.held);
      own.tabIndex = 0;
      if (crossed) spans[side === "query" ? "key" : "query"][0].tabIndex = 0;
      const tokens = side === "query" ? queries : keys;
      $(".looks").textContent = looks ? `${named(tokens, i)} looks at` : "";
      $(".seen").textContent = seen ? `${named(tokens, i)} is looked at by` : "";
      list($(".forward"), looks, keys, nk, (k) => shown(h, i, k), most);
      list($(".backward"), seen, queries, nq, (q) => shown(h, q, i), most);
    }
    function list(box, wanted, tokens, n, of, most) {
      box.replaceChildren();
      box.parentElement.hidden = !wanted;
      if (!wanted) return;
      const found = [];
      let absent = 0;
      for (let i = 0; i < n; i++) {
        const v = of(i);
        if (Number.isNaN(v)) absent++;
        else if (Math.abs(v) >= least) found.push([Math.abs(v), i, v]);
      }
      found.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
      for (const [strength, i, v] of found.slice(0, TOP)) {
        const bar = element("span", { class: "bar" });
        bar.style.width = `${Math.min(100, (100 * strength) / most)}%`;
        const label = element("span", { class: "token" }, tokens[i], element("small", {}, ` ${i}`));
        box.append(element("li", {}, label, element("span", { class: "track" }, bar), element("b", {}, number(v))));
      }
      if (!found.length) box.append(element("li", { class: "none" }, "nothing above zero"));
      const more = found.length - TOP;
      if (more > 0) box.append(element("li", { class: "none" }, `and ${more} more`));
      if (absent) box.append(element("li", { class: "none" }, `${absent} without a value`));
    }

    // ---- all together ----
    function recolour() {
      colours = palette(meta.scales[dark.matches ? "dark" : "light"]);
      drawMap();
      drawText();
      thumbnails();
    }
    $(".opening").remove();
    root.querySelectorAll("[hidden]:not(.tip)").forEach((part) => { part.hidden = false; });
    root.classList.toggle("single", heads.length === 1);
    $(".first").textContent = keys[0];
    $(".stretch").checked = state.stretch;
    $(".stretch").addEventListener("change", (event) => { state.stretch = event.target.checked; recolour(); });
    $(".hide-first").addEventListener("change", (event) => { state.hide = event.target.checked; recolour(); });
    const gaps = countMissing();
    const notes = [...meta.notes, ...(gaps ? [`${gaps} cells have no value (NaN or infinite); they are hatched.`] : [])];
    $(".notes").textContent = notes.join(" ");
    function countMissing() {
      let n = 0;
      for (let i = 0; i < data.length; i++) if (data[i] === missing) n++;
      return n;
    }
    colours = palette(meta.scales[dark.matches ? "dark" : "light"]);
    buildPicker();
    buildText();
    listenToMap();
    spread();
    pick(meta.start);
    thumbnails();
    dark.addEventListener("change", recolour);
    let width = $(".frame").clientWidth;
    new ResizeObserver(() => {
      if ($(".frame").clientWidth !== width) { width = $(".frame").clientWidth; spread(); reveal(); drawMap(); }
    }).observe($(".frame"));
    root.dataset.ready = "";
    tellHeight();
  }
})();
