"""The weights of an encoder stacked by layer, and those of its embeddings and heads."""

from jaxtyping import Float
from torch import Tensor

from hooked_lm.models.weights.views import NoView, WeightViews


class EncoderViews(WeightViews):
    """`model.W_Q` and its like, as in `WeightViews`; `W_E`, `W_pos` and `W_token_type` are as wide as the embedding."""

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_embed"]:
        """The position embedding; AttributeError where positions are not learned."""
        if self.embed.pos_embed is None:
            raise NoView("the positions of this model are not learned, so it has no W_pos")
        return self.embed.pos_embed.table()

    @property
    def W_token_type(self) -> Float[Tensor, "type d_embed"]:
        """The vectors of token types."""
        if self.embed.token_type_embed is None:
            raise NoView("this model has no token types, so it has no W_token_type")
        return self.embed.token_type_embed.W_token_type

    @property
    def W_U(self) -> Float[Tensor, "d_out d_vocab"]:
        """The unembedding, which reads what the MLM head gives."""
        self._need_unembed("W_U")
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias."""
        self._need_unembed("b_U")
        return self._zeros(self.cfg.d_vocab_out) if self.unembed.b_U is None else self.unembed.b_U

    def _need_unembed(self, name: str) -> None:
        if self.unembed is None:
            raise NoView(f"this checkpoint has no head over the vocabulary, so the model has no {name}")
