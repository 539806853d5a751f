"""The unembedding of a model whose embedding has the same weights."""

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.embeddings.embed import Embed, Unembed


class TiedUnembed(Unembed):
    """An unembedding whose `W_U` is the transpose of the embedding's `W_E`, which is the only parameter.

    The state dict has an entry `W_U` too; one that differs from `W_E` is refused.
    """

    _embed: tuple[Embed]
    tied_to = "embed.W_E"  # the name of that weight in a model's state dict

    def __init__(self, cfg: Unembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple, so that the embedding is no submodule
        super().__init__(cfg)

    def _make_weight(self) -> None:
        """Makes no parameter."""

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self._embed[0].W_E.T

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "W_U"] = self.W_U if keep_vars else self.W_U.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        theirs, tied_to = state_dict.get(prefix + "W_U"), state_dict.get(self.tied_to, self._embed[0].W_E)
        own = {name: value for name, value in state_dict.items() if name != prefix + "W_U"}
        super()._load_from_state_dict(own, prefix, *args)
        if theirs is not None and not torch.equal(theirs.T.to(tied_to), tied_to):
            args[-1].append(
                f"'{prefix}W_U' differs from '{self.tied_to}', to which this model ties it; call model.untie() first"
            )
