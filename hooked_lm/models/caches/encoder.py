"""The cache of an encoder's run: that of a decoder, where the two can be read alike."""

from typing import Any

from torch import Tensor

from hooked_lm.models.caches.activation_cache import ActivationCache


class EncoderActivations(ActivationCache):
    """Name -> tensor of one run, with short names: `cache["z", 5]`, `cache["normalized_resid_post", -1]`.

    The stream of blocks with norms before their sublayers can be taken apart as in `ActivationCache`; where norms stand in
    it (BERT) what needs a sum raises ValueError.
    """

    def _with(self, cache_dict: dict[str, Tensor], has_batch_dim: bool | None = None) -> "EncoderActivations":
        has_batch_dim = self.has_batch_dim if has_batch_dim is None else has_batch_dim
        return EncoderActivations(cache_dict, self.model, has_batch_dim)

    def logit_attrs(self, *args: Any, **kwargs: Any) -> Tensor:
        """What each component adds to the logits; ValueError where a head that is not linear stands before them."""
        if self.model.mlm_head is not None:
            raise ValueError(
                "between stream and logits stands mlm_head, which is not linear: no component has a share of its own in a "
                "logit. Gradients tell what matters: run_with_cache, then backward() from a logit, with incl_bwd or by hand"
            )
        return super().logit_attrs(*args, **kwargs)
