"""The weights of an encoder-decoder stacked by layer: those of the encoder, then those of the decoder."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.moe import MoE
from hooked_lm.models.weights.views import NoView, WeightViews


class EncoderDecoderViews(WeightViews):
    """`model.W_Q` and its like, of self-attention and MLPs: [encoder and decoder layer, head, ...].

    They are copies: to edit a weight, edit it in its block. An absent bias reads as zeros. The weights of cross attention
    are those of `model.decoder[i].cross_attn`, stacked as `cross_W_Q` and its like.
    """

    encoder: Any
    decoder: Any

    @property
    def blocks(self) -> list[Any]:
        """All layers: those of the encoder, then those of the decoder."""
        return [*self.encoder, *self.decoder]

    def _stack(self, read: Callable[[Any], Tensor]) -> Tensor:
        weights = [read(block) for block in self.blocks]
        if len({weight.shape for weight in weights}) > 1:
            raise NoView(
                "encoder and decoder have weights of different shapes here, which cannot be stacked; read them layer by "
                "layer, as model.encoder[0].attn.W_Q or model.decoder[0].mlp.W_in"
            )
        return torch.stack(weights)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """There is none: the layers write into two streams."""
        raise ValueError("the layers of an encoder-decoder write into two streams, so their biases have no one sum")

    def all_composition_scores(self, mode: str) -> Tensor:
        """There are none: the layers write into two streams."""
        raise ValueError("the layers of an encoder-decoder write into two streams, so not all of them compose")

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The position embedding of the encoder; AttributeError where the checkpoint holds none."""
        if not hasattr(self, "pos_embed") or not hasattr(self.pos_embed, "W_pos"):
            raise NoView("W_pos: the positions of this model are not learned")
        return self.pos_embed.table()

    def _mlp_weight(self, name: str) -> Tensor:
        def read(block: Any) -> Tensor:
            if isinstance(block.mlp, MoE):
                raise NoView(f"layers of this model have experts, so {name} cannot be stacked by layer")
            weight = getattr(block.mlp, name)
            if weight is None:  # a bias, as long as the last axis of its weight
                return self._zeros(getattr(block.mlp, name.replace("b_", "W_")).shape[-1])
            return weight

        return self._stack(read)

    def _cross(self, read: Callable[[Any], Tensor]) -> Tensor:
        return torch.stack([read(block.cross_attn) for block in self.decoder])

    @property
    def cross_W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights of cross attention."""
        return self._cross(lambda attn: attn.W_Q)

    @property
    def cross_W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights of cross attention."""
        return self._cross(lambda attn: attn.W_K)

    @property
    def cross_W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights of cross attention."""
        return self._cross(lambda attn: attn.W_V)

    @property
    def cross_W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights of cross attention."""
        return self._cross(lambda attn: attn.W_O)

    def all_head_labels(self) -> list[str]:
        """EL0H0, EL0H1, ... of the encoder's layers and heads, then DL0H0, ... of the decoder's."""
        sides = {"E": self.encoder, "D": self.decoder}
        return [
            f"{side}L{layer}H{head}"
            for side, blocks in sides.items()
            for layer, block in enumerate(blocks)
            for head in range(block.attn.cfg.n_heads)
        ]
