"""Rows of attention scores and patterns, read where they are computed, and pages of them."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.head_labels import Heads, parse_head_label
from hooked_lm.hooks.hook_spec import HookList
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.models.attention_pages import MOST_ROWS, BlockMaxima, overview_page, rows_page
from hooked_lm.models.attention_pages import Heads as ViewHeads
from hooked_lm.models.stack import Stack
from hooked_lm.models.text.chat import Chat

if TYPE_CHECKING:
    from hooked_lm.viz.view import View

SITES = {"pattern": "hook_pattern", "scores": "hook_attn_scores"}
Rows = dict[int, Float[Tensor, "batch head query key_pos"]]


class AttentionRowMethods(HookedRootModule):
    """`attention_rows` of a model, and pages of them."""

    stacks: ClassVar[tuple[Stack, ...]]

    def attention_rows(
        self,
        *inputs: object,
        layers: Indices = None,
        heads: Heads = None,
        query_positions: Indices = -1,
        what: str = "pattern",
        **options: object,
    ) -> Rows:
        """Rows of attention patterns or scores, layer -> [batch, head, query, key_pos], without computing the other rows.

        They are those of `run_with_cache`, computed by the same steps from the queries of these positions and all keys, while
        attention itself runs as in a run without hooks. So memory grows with the length of the prompt, not with its square. A
        dictionary, since layers may lack attention and differ in their heads; `viz.attention` draws one.

        Args:
            inputs, options: the arguments of `run_with_cache`: a prompt, and `attention_mask`, `fwd_hooks` and others.
            layers: indices; None: all layers that have attention.
            heads: indices, or labels such as "L1H7", which name the layers, too; None: all.
            query_positions: columns of the prompts, padding counted, in this order; an int is one row.
            what: "pattern", or "scores", before the softmax, with masks and biases.

        Raises ValueError for a layer without softmax attention and for a model with two stacks, IndexError for a layer, head or
        position that there is not.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> rows = model.attention_rows(
        ...     "When Mary and John left", layers=[1, 2], query_positions=[-1, 2]
        ... )
        >>> rows[2].shape
        torch.Size([1, 8, 2, 6])
        """
        if what not in SITES:
            raise ArgumentError(f"what must be 'pattern' or 'scores', got {what!r}")
        by_label = _heads_by_layer(heads)
        sites = self._attention_sites(SITES[what], sorted(by_label) if by_label and layers is None else layers)
        if outside := sorted(by_label.keys() - sites):
            raise ArgumentError(f"heads={heads!r} has a head of layer {outside[0]}, and the layers are {list(sites)}")
        sites = {layer: site for layer, site in sites.items() if layer in (by_label or sites)}
        given: dict[str, Any] = {
            "return_type": None,
            "pos_slice": plain_indices("query_positions", query_positions),
            **options,
        }
        _, cache = self.run_with_cache(*inputs, names_filter=list(sites.values()), **given)
        rows = {layer: cache[site] for layer, site in sites.items()}
        if heads is None:
            return rows
        same = None if by_label else plain_indices("heads", heads)
        return {
            layer: found[:, indices_in("heads", by_label.get(layer, same), found.shape[1], sites[layer])]
            for layer, found in rows.items()
        }

    def attention(
        self,
        prompt: str | Int[Tensor, "*one pos"] | Chat,
        layers: Indices = None,
        heads: ViewHeads = None,
        query_positions: Indices = None,
        fwd_hooks: HookList = (),
        **options: object,
    ) -> "View":
        """A page of where the tokens of a prompt look, without memory that grows with the square of its length.

        Prompts of up to 1,024 tokens are shown row by row. Of longer ones the page is an overview: the largest weight of each
        block of queries and keys, of at most 256 x 256 blocks; single rows are those of `query_positions`.

        Args:
            prompt: a text, token ids, or a conversation.
            layers: indices; None: all layers that have attention.
            heads: show these alone, such as "L1H7".
            query_positions: show the rows of these tokens alone, also of long prompts.
            fwd_hooks, options: as for `run_with_hooks`.

        Raises as `attention_rows`, and ValueError for several prompts.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> model.attention("When Mary and John left", layers=[1], query_positions=-1)
        View('Attention', 8 heads, 1 x 6 tokens; .show() opens it in a browser, .write_html(path) saves it)
        """
        model: Any = self
        text = prompt.tokens if isinstance(prompt, Chat) else prompt
        ids = torch.atleast_2d(text if isinstance(text, Tensor) else model.to_tokens(text))
        if len(ids) != 1:
            raise ArgumentError(f"a page shows one prompt, and these are {len(ids)}: give one of them")
        tokens: list[str] = model.to_str_tokens(ids[0])
        if query_positions is not None or len(tokens) <= MOST_ROWS:
            every = slice(None) if query_positions is None else query_positions
            given: dict[str, Any] = {**options, "fwd_hooks": fwd_hooks}
            rows = self.attention_rows(prompt, layers=layers, query_positions=every, **given)
            return rows_page({layer: found[0] for layer, found in rows.items()}, tokens, heads, query_positions)
        maxima, sites = BlockMaxima(len(tokens)), self._attention_sites(SITES["pattern"], layers)
        with torch.no_grad(), model.hooks(fwd_hooks), model.hooks([(site, maxima) for site in sites.values()]):
            model(prompt, stop_at_layer=max(sites) + 1, **options)
        return overview_page(maxima, tokens, heads)

    def _attention_sites(self, name: str, layers: Indices) -> dict[int, str]:
        """The site with this name of each of these layers; None: of all layers that have it."""
        if len(self.stacks) != 1:
            raise ArgumentError(
                f"attention_rows is of models with one stack of blocks, which {type(self).__name__} is not: run_with_cache(..., "
                f"names_filter='*.{name}', pos_slice=[-1]) gives the same rows of all its attention, by site"
            )
        [stack], points = self.stacks, self.all_points()
        blocks = stack.blocks_of(self)
        every = {layer: f"{stack.blocks}.{layer}.attn.{name}" for layer in range(len(blocks))}
        there = {layer: site for layer, site in every.items() if site in points}
        wanted = list(there) if layers is None else indices_in("layers", plain_indices("layers", layers), len(blocks))
        if wrong := [layer for layer in wanted if layer not in there] or ([] if there else [0]):
            mixer = type(getattr(blocks[wrong[0]], "mixer", blocks[wrong[0]])).__name__
            raise ArgumentError(
                f"layer {wrong[0]}, {mixer}, has no softmax attention; those that have are {list(there)}"
            )
        return {layer: there[layer] for layer in wanted}


def _heads_by_layer(heads: Heads) -> dict[int, list[int]]:
    """The heads of each layer, of labels such as "L1H7"; empty if heads are given as indices."""
    labels = [heads] if isinstance(heads, str) else heads if isinstance(heads, (list, tuple)) else ()
    found: dict[int, list[int]] = {}
    for label in labels if any(isinstance(one, str) for one in labels) else ():
        layer, head = parse_head_label(str(label))
        found.setdefault(layer, []).append(head)
    return found
