"""The cache of a model's run: activations by short names, and decompositions of the residual stream."""

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.hooks import Cache, HookedRootModule, Slice, SliceInput, UnknownSite, site_glob
from hooked_lm.hooks.head_labels import parse_head_label
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.select import advice
from hooked_lm.models.attention_pages import MOST_ROWS, BlockMaxima, overview_page, rows_page
from hooked_lm.models.caches import decompose
from hooked_lm.models.caches.residual import layer_bound
from hooked_lm.models.placement import together
from hooked_lm.models.weights.digest import weights_digest

if TYPE_CHECKING:
    from hooked_lm.viz import View

HEADS = ("head", "kv_head", "ssm_head")
Part = Slice | SliceInput
Stack = Float[Tensor, "component *lead d_model"]
Projected = Float[Tensor, "component *lead"]


def _with_labels(stack_and_labels: tuple[Tensor, list[str]], return_labels: bool) -> Any:
    return stack_and_labels if return_labels else stack_and_labels[0]


class NamedCache(Cache):
    """Name -> tensor of one run; reads the model's short names too, as in `cache["decoder.pattern", 0, "cross_attn"]`."""

    def __init__(self, cache_dict: dict[str, Tensor], model: HookedRootModule, has_batch_dim: bool = True) -> None:
        super().__init__(cache_dict, has_batch_dim)
        self.model = model

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, *, move_model: bool = False
    ) -> "NamedCache":
        """Moves all tensors to a device and a dtype, in place; with `move_model` moves the model to the device too."""
        super().to(device, dtype)
        if move_model:
            self.model.to(device)
        return self

    def model_facts(self) -> dict[str, Any]:
        """The name, sizes, processing and weights of the model."""
        cfg = getattr(self.model, "cfg", None)
        facts = {name: getattr(cfg, name, None) for name in ("model_name", "n_layers", "d_model")}
        return {**facts, "processed": list(getattr(cfg, "processed", ())), "weights": weights_digest(self.model)[:16]}

    def dims_of(self, site: str) -> tuple[str, ...]:
        """The axis names of a site, including batch; empty if the model has no such site."""
        points = getattr(self.model, "hook_dict", {})
        return points[site].dims if site in points else ()

    def full_name(self, key: object) -> str:
        """Resolves a short name, a tuple or another library's name to a full name; each may end in "_grad"."""
        first, *rest = key if isinstance(key, tuple) else (key,)
        if not isinstance(first, str):
            raise TypeError(f"a cache key must be a name or (name, layer[, sublayer]), got {key!r}")
        bare = first.removesuffix("_grad")
        if rest and isinstance(rest[0], str):
            raise TypeError(
                f"a layer is a number, got {key!r}; chosen heads are cache.stack_heads({first!r}, ['L1H7'])"
            )
        if rest and rest[0] is not None:
            rest[0] = index(rest[0])  # numpy's and torch's integers too
        aliases = self.model.aliases
        name = self.model.site_name((bare, *rest) if rest else aliases.get(bare, bare))
        name, ending = aliases.get(name, name), first[len(bare) :]
        if name + ending not in self.cache_dict and (same := self.model.same_value(name) + ending) in self.cache_dict:
            return same
        return name + ending

    def _missing(self, name: str) -> KeyError:
        """The error for an absent site: which filter keeps it, or that the model has no such site."""
        site, condition = name.removesuffix("_grad"), self._condition(name)
        if site not in self.model.hook_dict:
            other = advice(site, self.model.all_points()) + condition
            return UnknownSite(f"'{name}' is not in this cache, and the model has no such site; {other}")
        how = f"names_filter='{site_glob(site)}'" + (", incl_bwd=True" if name != site else "")
        why = " (it is computed on demand only)" if self.model.hook_dict[site].on_demand else ""
        return UnknownSite(f"'{name}' is not in this cache{why}; run_with_cache(..., {how}) keeps it{condition}")

    def _condition(self, name: str) -> str:
        """What an absent site needs besides a filter, after the error."""
        return ""


class ActivationCache(NamedCache):
    """Name -> tensor of one run, with short names: `cache["z", 5]`, `cache["resid_post", -1]`, `cache["k6"]`.

    The methods decompose the residual stream. Their common arguments:

    `layer`: the stream before this block, from 0; None and -1 mean after all blocks.
    `mlp_input`: the stream before the MLP of that block instead.
    `pos_slice`: selects positions: an int (drops the axis), a (start, stop) tuple, a list, or a `Slice`.
    `apply_ln`: applies the norm at `layer` to the components, with the scale of the run held fixed: centres them if it is
    a LayerNorm, and divides by the scale, without the norm's weight and bias.
    `return_labels`: returns (stack, labels) instead of the stack.

    Stacks are [component, batch, pos, d_model], without the axes that the cache or the slice lacks. Components sum to the
    stream, also if norms follow the sublayers. Raises KeyError, with the filter to use, for a value that was not cached,
    and IndexError for a layer that does not exist.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits, cache = model.run_with_cache("The capital of France is")
    >>> stack, labels = cache.decompose_resid(return_labels=True)
    >>> bool((stack.sum(0) - cache["resid_post", -1]).abs().max() < 1e-3), labels[0]
    (True, 'embed')
    """

    # ---- the stream ----------------------------------------------------------------------------------------

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Part = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack | tuple[Stack, list[str]]:
        """Returns the stream before each block up to a layer: the input of a logit lens.

        `incl_mid` adds the stream between attention and MLP of each block; KeyError if a block has no such site.
        Labels are "0_pre", "0_mid", ..., "final_post". With `apply_ln` and `layer` after all blocks, the final norm is
        recomputed for each stream, including its weight and bias.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> lens = model.unembed(cache.accumulated_resid(apply_ln=True)[:, 0])
        >>> bool((lens[-1] - logits[0]).abs().max() < 1e-3)
        True
        """
        found = decompose.accumulated_resid(self.model, self, layer, incl_mid, apply_ln, pos_slice, mlp_input)
        return _with_labels(found, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Part = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Stack | tuple[Stack, list[str]]:
        """Returns what the embeddings and each sublayer added to the stream up to a layer; they sum to the stream.

        `mode` "attn" (and mixers) or "mlp" keeps only these sublayers. Labels are "embed", "pos_embed", "0_attn_out" (or
        "0_mixer_out"), "0_mlp_out".

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> cache.decompose_resid(mode="attn", incl_embeds=False).shape[0] == model.cfg.n_layers
        True
        """
        found = decompose.decompose_resid(self.model, self, layer, mlp_input, mode, apply_ln, pos_slice, incl_embeds)
        return _with_labels(found, return_labels)

    def apply_ln_to_stack(
        self,
        residual_stack: Stack,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Part = None,
        batch_slice: Part = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "component *rest d_model"]:
        """Applies the norm at a layer to components of the stream; see `apply_ln` above.

        The stack must already be sliced to `pos_slice`, and have the whole batch; `has_batch_dim` says whether it has a
        batch axis. `recompute_ln` normalizes each component by its own scale and applies the norm's weight and bias.
        Otherwise the components of a stream sum to the norm's `hook_normalized`.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> stack = cache.apply_ln_to_stack(cache.decompose_resid())
        >>> bool((stack.sum(0) - cache["normalized"]).abs().max() < 1e-3)
        True
        """
        return decompose.apply_ln_to_stack(
            self.model, self, residual_stack, layer, mlp_input, pos_slice, batch_slice, has_batch_dim, recompute_ln
        )

    def logit_attrs(
        self,
        residual_stack: Stack,
        tokens: object,
        incorrect_tokens: object = None,
        pos_slice: Part = None,
        batch_slice: Part = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "component *rest"]:
        """Returns each component's contribution to the logit of a token, or to a logit difference: [component, ...].

        `residual_stack` must be without the final norm, as `decompose_resid()` and `stack_head_results()` return it: it is
        applied here, linearised as in `apply_ln_to_stack`, with its weight. A stack from `apply_ln=True` would be
        normalised twice.

        `tokens` and `incorrect_tokens` (of the same shape, else ValueError) are a string or an id, strings or ids
        [batch], or ids [batch, pos]. Summed over all components of a stream, this is the logit before any soft cap, except for
        `b_U` and, if it is not folded, the norm's bias times the token's direction.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> parts = cache.logit_attrs(cache.decompose_resid(), 7, incorrect_tokens=8).sum(0)
        >>> bias = model.b_U[7] - model.b_U[8]
        >>> bool((parts + bias - (logits[..., 7] - logits[..., 8])).abs().max() < 1e-3)
        True
        """
        return decompose.logit_attrs(
            self.model, self, residual_stack, tokens, incorrect_tokens, pos_slice, batch_slice, has_batch_dim
        )

    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layer ..."]:
        """Returns one activation of each block before a layer, [layer, ...].

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> cache.stack_activation("pattern").shape[:3]  # [layer, batch, head]
        torch.Size([4, 1, 8])
        """
        bound = layer_bound(self.model, layer)
        return torch.stack(together([self[activation_name, i, sublayer_type] for i in range(bound)], self.model.device))

    # ---- heads ---------------------------------------------------------------------------------------------

    def stack_heads(self, activation_name: str, heads: str | Sequence[str]) -> Float[Tensor, "head ..."]:
        """Returns the values of chosen heads, of any layers, [head, ...]: those of a site without its axis of heads.

        `heads` are labels such as "L1H7", one or several. Of sites of keys and values they are key/value heads.
        Raises ValueError for other labels and for a site without heads, IndexError for a head that does not exist.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> # [head, batch, query_pos, key_pos]
        >>> patterns = cache.stack_heads("pattern", ["L1H7", "L2H0"])
        >>> bool((patterns[1] == cache["pattern", 2][:, 0]).all())
        True
        """
        labels = [heads] if isinstance(heads, str) else list(heads)
        if not labels:
            raise ValueError("heads is empty: give at least one label, such as 'L1H7'")
        return torch.stack(together([self._of_head(activation_name, label) for label in labels], self.model.device))

    def _of_head(self, activation_name: str, label: str) -> Float[Tensor, "..."]:
        layer, head = parse_head_label(label)
        value, dims = self[activation_name, layer], self.dims_of(self.full_name((activation_name, layer)))
        axis = next((dims.index(name) - len(dims) for name in HEADS if name in dims), None)
        if axis is None:
            raise ValueError(f"{activation_name!r} [{', '.join(dims)}] has no axis of heads")
        if head >= (n := value.shape[axis]):
            raise IndexError(f"head {label!r} does not exist: {activation_name!r} of layer {layer} has {n} heads")
        return value.select(axis, head)

    def compute_head_results(self) -> None:
        """Adds `hook_result` of all layers to the cache, computed from `hook_z` if missing.

        It is the output of each head before any norm after attention, [batch, pos, head, d_model].

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> cache.compute_head_results()
        >>> cache["result", 0].shape[2:]  # of [batch, pos, head, d_model]
        torch.Size([8, 128])
        """
        for i, block in enumerate(self.model.blocks):
            if has_part(block, "attn"):
                self.cache_dict[f"blocks.{i}.attn.hook_result"] = decompose.head_results(self.model, self, i)

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Part = None,
        apply_ln: bool = False,
    ) -> Stack | tuple[Stack, list[str]]:
        """Returns what each head before a layer added to the stream, and with `incl_remainder` the rest of the stream.

        Computed from `hook_z` if `hook_result` was not cached. Labels are "L0H0", ..., "remainder".

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> stack, labels = cache.stack_head_results(return_labels=True, pos_slice=-1)
        >>> labels == model.all_head_labels(), stack.shape
        (True, torch.Size([32, 1, 128]))
        """
        found = decompose.stack_head_results(self.model, self, layer, incl_remainder, pos_slice, apply_ln)
        return _with_labels(found, return_labels)

    # ---- neurons -------------------------------------------------------------------------------------------

    def get_neuron_results(
        self, layer: int, neuron_slice: Part = None, pos_slice: Part = None, project_output_onto: Tensor | None = None
    ) -> Float[Tensor, "..."]:
        """Returns what each neuron of a layer added to the stream, [batch, pos, neuron, d_model].

        With `project_output_onto` [d_model, n] the last axis holds the products with these directions; with [d_model]
        there is no last axis. The full tensor is not allocated then.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> cache.get_neuron_results(0, neuron_slice=(0, 5), pos_slice=-1).shape
        torch.Size([1, 5, 128])
        """
        return decompose.get_neuron_results(self.model, self, layer, neuron_slice, pos_slice, project_output_onto)

    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Part = None,
        neuron_slice: Part = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Projected | tuple[Projected, list[str]]:
        """Returns what each neuron before a layer added to the stream, and with `incl_remainder` the rest.

        The size is d_mlp times that of the stream for every layer: select few positions or neurons, or use
        `project_output_onto` as in `get_neuron_results`. Labels are "L0N0", ..., "remainder".

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> cache.stack_neuron_results(1, pos_slice=-1, neuron_slice=[3, 8], return_labels=True)[
        ...     1
        ... ]
        ['L0N3', 'L0N8']
        """
        found = decompose.stack_neuron_results(
            self.model, self, layer, pos_slice, neuron_slice, incl_remainder, apply_ln, project_output_onto
        )
        return _with_labels(found, return_labels)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Part = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Projected | tuple[Projected, list[str]]:
        """Returns what each head, neuron (or MLP), embedding and the biases added; they sum to the stream at a layer.

        With `project_output_onto` [d_model, n] or [d_model], returns products with these directions, as in
        `get_neuron_results`, after the norm if `apply_ln`. Labels: heads, neurons ("L0N0") or MLPs ("0_mlp_out"),
        "embed", "pos_embed", "bias".

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache("The capital of France is")
        >>> stack, labels = cache.get_full_resid_decomposition(pos_slice=-1, return_labels=True)
        >>> bool((stack.sum(0) - cache["resid_post", -1][:, -1]).abs().max() < 1e-3), labels[-1]
        (True, 'bias')
        """
        found = decompose.get_full_resid_decomposition(
            self.model, self, layer, mlp_input, expand_neurons, apply_ln, pos_slice, project_output_onto
        )
        return _with_labels(found, return_labels)

    # ---- pictures ------------------------------------------------------------------------------------------

    def attention(
        self,
        prompt: str | Int[Tensor, "*one pos"],
        layers: int | Sequence[int] | None = None,
        heads: str | int | Sequence[str | int] | None = None,
        row: int = 0,
        query_positions: Indices = None,
    ) -> "View":
        """The view of `viz.attention` of the cached patterns: choose a head, and see where each token looks.

        Of more than 1,024 tokens it is an overview: the largest weight of each block of queries and keys, of at most 256 x 256
        blocks. `model.attention` makes the same pages without a cache, whose patterns grow with the square of the length.

        Args:
            prompt: the text of the run, or its token ids if they are not those of `model.to_tokens(text)`.
            layers: these alone; every layer whose pattern was cached if None.
            heads: show these alone, such as "L1H7".
            row: which prompt of a batch.
            query_positions: show the rows of these tokens alone, also of long prompts.

        Raises ValueError if the prompt has another number of tokens than the run, KeyError if no pattern was cached, IndexError
        for a layer or a row that does not exist.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> prompt = "When Mary and John went to the store"
        >>> logits, cache = model.run_with_cache(prompt)
        >>> cache.attention(prompt, layers=3)
        View('Attention', 8 heads, 9 x 9 tokens; .show() opens it in a browser, .write_html(path) saves it)
        """
        n_layers = self.model.cfg.n_layers
        chosen = range(n_layers) if layers is None else [layers] if isinstance(layers, int) else layers
        if wrong := [layer for layer in chosen if not -n_layers <= layer < n_layers]:
            raise IndexError(f"there is no layer {wrong[0]}: the model has {n_layers}")
        named = {layer % n_layers: f"pattern{layer % n_layers}" for layer in chosen}
        if layers is None:
            named = {layer: name for layer, name in named.items() if name in self} or {0: "pattern0"}
        patterns = {layer: self[name][row] if self.has_batch_dim else self[name] for layer, name in named.items()}
        tokens = self.model.to_str_tokens(prompt)
        n_tokens = next(iter(patterns.values())).shape[-2]
        if len(tokens) != n_tokens:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and the run had {n_tokens}: give the token ids of the run, such as "
                "model.to_tokens(text, prepend_bos=False)"
            )
        if query_positions is not None:
            queries = indices_in("query_positions", plain_indices("query_positions", query_positions), n_tokens)
            patterns = {layer: pattern[:, queries] for layer, pattern in patterns.items()}
        elif n_tokens > MOST_ROWS:
            maxima = BlockMaxima(n_tokens)
            for layer, pattern in patterns.items():
                maxima.add(layer, pattern, 0)
            return overview_page(maxima, tokens, heads)
        return rows_page(patterns, tokens, heads, query_positions)
