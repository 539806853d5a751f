"""The weights of a model stacked by layer, and quantities derived from them."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.wiring import has_norms_before_parts, has_part, sublayer_of, wiring_of
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.models.names import checked_index
from hooked_lm.models.placement import together
from hooked_lm.models.stack import Stack
from hooked_lm.models.weights.terms import Term, product, terms_of, times


class NoView(AttributeError, ValueError):
    """A weight that the model lacks in some layer or has in several shapes; an AttributeError, so `hasattr` is False."""


class WeightViews:
    """`model.W_Q` and the like, [layer, head, ...]. They are copies: to edit a weight, edit it in its block.

    An absent bias is zeros. Keys and values of grouped-query models are repeated for each query head. A weight that cannot
    be stacked raises NoView, an AttributeError with the reason.
    """

    cfg: Any
    embed: Any
    stacks: ClassVar[tuple[Stack, ...]]
    _modules: dict[str, Any]
    unembed: Any
    blocks: Any  # a ModuleList of blocks
    parameters: Any
    positions_at: ClassVar[tuple[str, ...]] = ("pos_embed",)  # the path of the position embedding

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`, but with a block's norms before its sublayers and its router last, the order
        of `HookedTransformer`."""
        named = list(super().named_parameters(*args, **kwargs))  # type: ignore[misc]
        first: dict[str, int] = {}  # the index of a block's first parameter

        def order(i: int) -> tuple[int, int]:
            first_part, block, rest = [*named[i][0].split(".", 2), "", ""][:3]
            if first_part != "blocks" or not has_norms_before_parts(self.blocks[int(block)]):
                return i, 0
            part = rest.split(".")[0]
            is_router = rest in ("mlp.W_router", "mlp.b_router")
            return first.setdefault(block, i), 0 if part in ("ln1", "ln1_post", "ln2", "ln2_post") else 1 + is_router

        yield from [named[i] for _, i in sorted((order(i), i) for i in range(len(named)))]

    def _stack(self, read: Callable[[Any], Tensor]) -> Tensor:
        weights = [read(block) for block in self.blocks]
        if len({weight.shape for weight in weights}) > 1:
            raise NoView(
                "this weight differs in shape between layers, so it cannot be stacked; read it layer by layer, as in "
                f"model.{self.stacks[0].blocks}[0].mlp.W_in"
            )
        return torch.stack(together(weights, self.embed.W_E.device))

    def _zeros(self, *shape: int) -> Tensor:
        return self.embed.W_E.new_zeros(shape)

    def _attention_weight(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        if lacking := [i for i, block in enumerate(self.blocks) if not has_part(block, "attn")]:
            raise NoView(f"this model has no attention in blocks {lacking}, so {name} cannot be stacked by layer")
        weight = name.replace("b_", "W_")
        shapes = [tuple(w.shape) if (w := getattr(b.attn, weight, None)) is not None else None for b in self.blocks]
        if set(shapes) == {None}:
            has = ", ".join(n for n, _ in self.blocks[0].attn.named_parameters(recurse=False) if n.startswith("W_"))
            raise NoView(f"the attention of this model has no {weight} (it has {has}), so {name} cannot be stacked")
        if len(set(shapes)) > 1:
            raise NoView(f"{weight} differs in shape between layers, so {name} cannot be stacked: {shapes}")
        return self._stack(lambda block: read(block.attn))

    def _mlp_weight(self, name: str) -> Tensor:
        if lacking := [i for i, block in enumerate(self.blocks) if not has_part(block, "mlp")]:
            raise NoView(f"this model has no MLPs in blocks {lacking}, so {name} cannot be stacked by layer")
        if sparse := [i for i, block in enumerate(self.blocks) if isinstance(block.mlp, AbstractMoE)]:
            raise NoView(
                f"the MLPs of blocks {sparse} are mixtures of experts, so {name} cannot be stacked by layer; "
                f"read it from an expert: model.blocks[{sparse[0]}].mlp.experts[0].{name}"
            )

        def read(block: nn.Module) -> Tensor:
            weight = getattr(block.mlp, name)
            if weight is None:  # a bias, as long as the last axis of its weight
                return self._zeros(getattr(block.mlp, name.replace("b_", "W_")).shape[-1])
            return weight

        return self._stack(read)

    def _head_bias(self, name: str) -> Tensor:
        def read(attn: AbstractAttention) -> Tensor:
            bias = getattr(attn, name)
            if bias is None:
                return self._zeros(self.cfg.n_heads, self.cfg.d_head)
            return attn.per_query_head(bias)

        return self._attention_weight(name, read)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding."""
        return self.embed.table()

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The position embedding (of the encoder in an encoder-decoder); AttributeError if positions are not learned."""
        return self._positions().W_pos

    def _positions(self) -> Any:
        """The module of learned positions."""
        module: Any = self
        for name in self.positions_at:
            module = getattr(module, name, None)
        if getattr(module, "W_pos", None) is None:
            raise NoView("the positions of this model are not learned, so it has no W_pos")
        return module

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """Embedding and position embedding, concatenated."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return self._unembed("W_U").W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias."""
        bias = self._unembed("b_U").b_U
        return self._zeros(self.cfg.d_vocab_out) if bias is None else bias

    def _unembed(self, name: str) -> Any:
        if self.unembed is None:
            raise NoView(f"this checkpoint has no language modelling head, so the model has no {name}")
        return self.unembed

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights."""
        return self._attention_weight("W_Q", lambda attn: attn.W_Q)

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights."""
        return self._attention_weight("W_K", lambda attn: attn.per_query_head(attn.W_K))

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights."""
        return self._attention_weight("W_V", lambda attn: attn.per_query_head(attn.W_V))

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights."""
        return self._attention_weight("W_O", lambda attn: attn.W_O)

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Query biases."""
        return self._head_bias("b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head d_head"]:
        """Key biases."""
        return self._head_bias("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head d_head"]:
        """Value biases."""
        return self._head_bias("b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of attention."""
        zeros = self._zeros(self.cfg.d_model)
        return self._attention_weight("b_O", lambda attn: zeros if attn.b_O is None else attn.b_O)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Input weights of the MLPs."""
        return self._mlp_weight("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"] | None:
        """Gate weights of the MLPs; None if they are not gated."""
        return self._mlp_weight("W_gate") if self.cfg.gated_mlp else None

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """Output weights of the MLPs."""
        return self._mlp_weight("W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """Input biases of the MLPs."""
        return self._mlp_weight("b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of the MLPs."""
        return self._mlp_weight("b_out")

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_K^T` of every head, [layer, head, d_model, d_model]: destination and source residual to score."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` of every head, [layer, head, d_model, d_model]: source residual to the output at the destination."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def n_params_total(self) -> int:
        """The number of parameters, including embeddings and biases."""
        return sum(parameter.numel() for parameter in self.parameters())

    def all_head_labels(self) -> list[str]:
        """Returns "L0H0", "L0H1", ... in the order of `W_Q`, without layers that have no attention.

        In an encoder-decoder, the heads of the encoder are "EL0H0", ..., and those of the decoder "DL0H0", ...
        """
        labels = []
        for stack in self.stacks:
            for layer, block in enumerate(stack.blocks_of(self)):  # type: ignore[arg-type]
                heads = range(block.cfg.attn.n_heads) if has_part(block, "attn") else ()  # type: ignore[union-attr, arg-type]
                labels += [f"{stack.label}L{layer}H{head}" for head in heads]
        return labels

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """Returns the sum of the output biases added to the stream before `layer` (n_layers: before the final norm).

        `mlp_input` includes the attention of that layer too; `include_mlp_biases=False` counts attention and mixers only.
        Biases count as far as they reach that place, times what multiplies the stream on the way; those that blocks add to the
        stream itself are among them. Raises ValueError if a norm follows the biases, which then add no constant.
        """
        if len(self.stacks) > 1:
            raise ValueError("an encoder-decoder has two residual streams, so its output biases have no single sum")
        n_layers = self.cfg.n_layers
        layer = n_layers if layer == n_layers and not mlp_input else checked_index(layer, n_layers, "layer")
        value = None
        if mlp_input:  # of a layer without an MLP the stream after it
            block = self.blocks[layer]
            value = sublayer_of(block, "mlp").reads if has_part(block, "mlp") else wiring_of(block).last
        of = terms_of(self, layer, value)  # type: ignore[arg-type]
        parts = ("attn", "mixer", "mlp") if include_mlp_biases else ("attn", "mixer")
        biases = [_constant(self.blocks[term.layer], term) for term in of.of(*parts)]
        biases += [constant for _, constant in of.constants]
        total = self._zeros(self.cfg.d_model)
        for bias in biases:
            total = total if bias is None else total + bias.to(total)
        return total

    def all_composition_scores(self, mode: str) -> Float[Tensor, "layer head layer head"]:
        """Returns the composition score of every pair of heads, through queries ("Q"), keys ("K") or values ("V").

        `|OV1 M2| / (|OV1| |M2|)` in Frobenius norms (Elhage et al. 2021, A Mathematical Framework for Transformer
        Circuits); zero unless the second head's layer is later.
        """
        if len(self.stacks) > 1:
            raise ValueError("an encoder-decoder has two residual streams, so not all pairs of its heads compose")
        input_maps = {"Q": lambda: self.QK, "K": lambda: self.QK.T, "V": lambda: self.OV}
        if mode not in input_maps:
            raise ValueError(f"mode must be 'Q', 'K' or 'V', got {mode!r}")
        left, right = self.OV, input_maps[mode]()
        # factors collapsed to width d_head have the same norm as the full products, and give all pairs in one product
        products = torch.einsum("abhm,cdmk->abcdhk", left.collapse_l(), right.collapse_r())
        scores = products.norm(dim=(-2, -1)) / (left.norm()[:, :, None, None] * right.norm())
        layers = torch.arange(self.cfg.n_layers, device=scores.device)
        return scores * (layers[:, None, None, None] < layers[None, None, :, None])


class EncoderWeightViews(WeightViews):
    """Weight views of an encoder; `W_E`, `W_pos` and `W_token_type` have the width of the embedding."""

    positions_at = ("embed", "pos_embed")

    @property
    def W_token_type(self) -> Float[Tensor, "type d_embed"]:
        """The vectors of token types."""
        if self.embed.token_type_embed is None:
            raise NoView("this model has no token types, so it has no W_token_type")
        return self.embed.token_type_embed.W_token_type


class CrossWeightViews(WeightViews):
    """Weight views of an encoder-decoder: layers of the encoder, then of the decoder; and weights of cross attention."""

    encoder: Any
    decoder: Any

    @property
    def blocks(self) -> list[Any]:
        """All layers: those of the encoder, then those of the decoder."""
        return [*self.encoder, *self.decoder]

    @property
    def cross_W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights of cross attention."""
        return torch.stack(together([block.cross_attn.W_Q for block in self.decoder], self.embed.W_E.device))

    @property
    def cross_W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights of cross attention."""
        return torch.stack(
            together(
                [block.cross_attn.per_query_head(block.cross_attn.W_K) for block in self.decoder], self.embed.W_E.device
            )
        )

    @property
    def cross_W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights of cross attention."""
        return torch.stack(
            together(
                [block.cross_attn.per_query_head(block.cross_attn.W_V) for block in self.decoder], self.embed.W_E.device
            )
        )

    @property
    def cross_W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights of cross attention."""
        return torch.stack(together([block.cross_attn.W_O for block in self.decoder], self.embed.W_E.device))


def _constant(block: nn.Module, term: Term) -> Tensor | None:
    """What the biases of a sublayer and of the norm after it add to the stream at the place of its term, None for nothing;
    ValueError if the norm divides them by the scale of a run."""
    step = term.step
    assert step is not None, "a sublayer writes it"
    part, norm = getattr(block, step.part), norm_of(block, step.post)
    bias = part.constant_bias() if isinstance(part, AbstractMoE) else part.b_O if step.part == "attn" else part.b_out
    shift: Tensor | None = getattr(norm, "b", None)
    given = [each for each in (bias, shift) if each is not None]
    if not given:
        return None
    if hasattr(norm, "hook_scale"):
        raise ValueError(
            f"block {term.layer} normalises its output, so what its biases add depends on the input; see cache.decompose_resid"
        )
    added = norm_unhooked(norm, torch.zeros_like(given[0]) if bias is None else bias)
    return times(added, product(term.factor, step.scale))
