"""Attention patterns in a page: a head picker, a heat map, and the text with where each token looks."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.attention_data import Packed, pack, plain
from hooked_lm.viz.attention_heads import LONG, Heads, Layers, check_tokens, chosen_heads, head_label, layers_of
from hooked_lm.viz.labels import visible
from hooked_lm.viz.scales import scale_of, usual_limit
from hooked_lm.viz.theme import DARK_DIVERGING, DARK_SEQUENTIAL, DIVERGING, SEQUENTIAL
from hooked_lm.viz.view import View, as_json

HERE = Path(__file__)
LONGEST, TITLE = 40, "Attention"


def attention(
    pattern: Layers,
    tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    *,
    heads: Heads | None = None,
    title: str = TITLE,
    max_bytes: int = 4_500_000,
    note: str = "",
) -> View:
    """A view of attention: choose a head among thumbnails; hover over a token to see where it looks and who looks at it.

    In the page arrow keys move through heads (layer 0 is at the bottom), cells and tokens; a click on a token holds it. The
    first token, which often takes most of the attention, can be hidden. Values are shown as they are, whether or not rows
    sum to one; NaN and infinite ones are missing. Attention scores work, too.

    Of long texts a pixel shows the largest of its cells, colours end at what most rows look at most besides the first token, and
    a part is enlarged by dragging over it, or with + and - around the marked cell.

    Args:
        pattern: one layer [head, query_pos, key_pos], or several: a list from layer 0 on, or a dict by layer. Layers may have a
            batch of one prompt in front, as in a cache.
        tokens: one for each query, as strings.
        key_tokens: one for each key, where they differ from the queries, as in cross-attention.
        heads: show these alone, the first of them at first: labels such as "L1H7", or indices in a single layer. Of all heads
            that one is shown at first which looks most at tokens other than the first and its own.
        title: the heading of the view, if it is given, and the title of its document.
        max_bytes: the most text that the values may take in the page. Up to 500,000 values have 16 bits, more have 8. Of values
            that do not fit the largest of each query are kept; the page says how many, and their share of the whole.
        note: a sentence below the view.

    Raises ValueError for other shapes, tokens that do not fit, heads that do not exist, and more values than fit.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> _, cache = model.run_with_cache(prompt)
    >>> one_layer = attention(cache["pattern", 1], model.to_str_tokens(prompt))
    >>> every = {layer: cache["pattern", layer] for layer in range(model.cfg.n_layers)}
    >>> view = attention(every, model.to_str_tokens(prompt), heads=["L1H7", "L2H0"])
    """
    layers = layers_of(pattern)
    places = chosen_heads(layers, heads)
    n_queries, n_keys = next(iter(layers.values())).shape[1:]
    check_tokens(tokens, key_tokens, n_queries, n_keys)
    packed = pack([layers[layer][head] for layer, head in places], max_bytes)
    patterns = [plain(layers[layer][head]) for layer, head in places]
    ends = scale_of(torch.stack([end for each in patterns for end in each.nan_to_num().aminmax()]), 0.0)
    signed = ends.low < ends.white
    meta = {
        "queries": [visible(str(token), LONGEST) for token in tokens],
        "keys": None if key_tokens is None else [visible(str(token), LONGEST) for token in key_tokens],
        "start": 0 if heads is not None else _widest_look(patterns),
        "heads": [{"layer": layer, "head": head, "label": head_label(layer, head)} for layer, head in places],
        "stretch": max(n_queries, n_keys) > LONG,
        "limits": [usual_limit(each) for each in patterns],
        "signed": signed,
        "scales": _scales(signed),
        "notes": [*([note] if note else []), *_notes(packed, n_keys)],
        **{name: value for name, value in asdict(packed).items() if name != "data"},
    }
    heading = "" if title == TITLE else f"<h1>{html.escape(title)}</h1>\n"
    body = heading + BODY.format(meta=as_json(meta), data=packed.data)
    style, script = (HERE.with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))
    about = f"{len(places)} head{'s' * (len(places) != 1)}, {n_queries} x {n_keys} tokens"
    texts = [meta["queries"], *([meta["keys"]] if meta["keys"] else [])]
    height = _height(Counter(layer for layer, _ in places), texts) + 45 * bool(heading)
    return View(title, body, style=style, script=script, height=height, text=about)


def _height(heads: Mapping[int | None, int], texts: Sequence[Sequence[str]]) -> int:
    """About how many pixels of height the view takes if it is 900 pixels wide: the heads of each layer beside the map,
    and the texts below."""
    alone = sum(heads.values()) == 1
    picker = 0 if alone else min(560, sum(66 * -(-n // 6) for n in heads.values()))
    labels = min(110, 7 * max(len(token) for tokens in texts for token in tokens))
    room = (880 if alone else 500) - 1.5 * labels
    n_queries, n_keys = len(texts[0]), len(texts[-1])
    cells = n_queries * min(34, room / n_keys, 600 / n_queries)
    lines = sum(min(240, 36 + 28 * (sum(len(token) + 1 for token in tokens) // 95)) for tokens in texts)
    return round(max(picker, cells + labels + 130) + lines + 40 * len(texts) + 50 + 33 + 26 * min(8, n_keys))


def _widest_look(patterns: Sequence[Float[Tensor, "query_pos key_pos"]]) -> int:
    """The head that looks most at other tokens than the first and its own: that with the largest mean of the strongest looks."""
    looks = []
    for pattern in patterns:
        others = pattern.detach().float().nan_to_num(0.0, 0.0, 0.0).abs().clone()
        others[:, 0] = 0.0
        others.fill_diagonal_(0.0)
        looks.append(float(others.amax(-1).mean()))
    return max(range(len(looks)), key=looks.__getitem__)


def _scales(signed: bool) -> dict[str, list[tuple[float, str]]]:
    light, dark = (DIVERGING, DARK_DIVERGING) if signed else (SEQUENTIAL, DARK_SEQUENTIAL)
    return {"light": light, "dark": [(place, colour) for (place, _), colour in zip(light, dark, strict=True)]}


def _notes(packed: Packed, n_keys: int) -> list[str]:
    """What the page says of its numbers."""
    notes = []
    if packed.bits == 8:
        largest = max(-packed.low, packed.low + 254 * packed.step)
        notes.append(f"Values are rounded: the largest by up to {largest * packed.step:.1g}, small ones by less.")
    if packed.kept is not None:
        notes.append(
            f"Of the {n_keys} keys of each query the {packed.kept} with the largest values are kept, so that the page stays "
            f"small. They have {packed.coverage:.0%} of the whole; the rest is drawn as zero."
        )
    return notes


BODY = """<div class="attention">
<script type="application/json" class="meta">{meta}</script>
<script type="text/plain" class="data">{data}</script>
<p class="opening" role="status">Opening&hellip;</p>
<div class="panes" hidden>
<div class="picker"><h2>Heads</h2><div class="heads" role="radiogroup" aria-label="Heads"></div></div>
<div class="chosen">
<h2><span class="name"></span></h2>
<div class="options">
<label><input type="checkbox" class="hide-first"> Hide the first key, <span class="first"></span></label>
<label><input type="checkbox" class="stretch"> Stretch colours to this head</label>
<span class="zoom"><button type="button" class="closer" aria-label="Zoom in">+</button>
<button type="button" class="wider" aria-label="Zoom out">&minus;</button></span>
</div>
<div class="frame"><canvas tabindex="0" role="application" aria-label="Heat map; arrow keys move, + and - zoom"></canvas>
<div class="tip" hidden></div></div>
<p class="reading" aria-live="polite"></p>
<div class="legend"><span class="low"></span><span class="ramp"></span><span class="high"></span></div>
</div>
</div>
<div class="texts" hidden></div>
<div class="lists" hidden>
<section><h2 class="looks"></h2><ol class="forward"></ol></section>
<section><h2 class="seen"></h2><ol class="backward"></ol></section>
</div>
<p class="notes"></p>
</div>"""
