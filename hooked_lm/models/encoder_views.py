"""The weights of an encoder stacked by layer."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.models.weight_views import WeightViews


class EncoderViews(WeightViews):
    """`model.W_Q` and its like: [layer, head, ...]. They are copies: to edit a weight, edit it in its block."""

    embed: Any
    unembed: Any

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_embed"]:
        """The position embedding; AttributeError where positions are not learned."""
        return self.embed.pos_embed.table()

    @property
    def W_token_type(self) -> Float[Tensor, "n_types d_embed"]:
        """The embedding of token types; AttributeError where there are none."""
        return self.embed.token_type_embed.W_token_type

    @property
    def W_U(self) -> Float[Tensor, "d_embed d_vocab"]:
        """The unembedding of the head for masked tokens; AttributeError where there is none."""
        if self.unembed is None:
            raise AttributeError("this encoder has no head for masked tokens, and so no W_U")
        return self.unembed.W_U
