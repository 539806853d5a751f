"""A vision encoder: images in, a residual stream or an answer of its heads out."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.vision.deepstack import DeepstackMerger
from hooked_lm.components.vision.image_context import ImageFeatures
from hooked_lm.components.vision.patches import Patches
from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat_vision import HookedVisionConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.models.stack import Stream, apply_config_flags
from hooked_lm.models.verification.identities import vision_identities
from hooked_lm.models.verification.verify import Verification, verify
from hooked_lm.models.vision.inputs import Pixels
from hooked_lm.models.vision.tower import TowerParts, patches_of

RETURN_TYPES = ("output", "embeddings", "pooled", "projected", "logits", "tokens", None)


class VisionEncoder(TowerParts, BaseModel):
    """A vision tower in which every intermediate value has a name, built from a config.

    `batch` are images; `pos` are class tokens, then patches row by row. Absent heads are None: `pooler`, `projection`,
    `classifier`, `merger`. `hooked_lm.HookedVisionEncoder` adds loading and saving of checkpoints.

    >>> import torch
    >>> from hooked_lm.models.vision.encoder import VisionEncoder
    >>> model = VisionEncoder(
    ...     dict(
    ...         n_layers=2, d_model=16, n_heads=2, image_size=8, patch_size=4, act_fn="gelu"
    ...     )
    ... )
    >>> model(torch.zeros(1, 3, 8, 8), return_type="embeddings").shape
    torch.Size([1, 5, 16])
    """

    config_class = HookedVisionConfig

    def __init__(
        self, cfg: HookedTransformerConfig | dict[str, Any], tokenizer: Any = None, move_to_device: bool = True
    ) -> None:
        super().__init__()
        self._set_config(HookedVisionConfig.unwrap(cfg), None)
        with self._initial_device(move_to_device):
            self.make_tower(self.tree)
        self._finish()

    saved_tokenizer = None

    def set_tokenizer(self, tokenizer: None) -> None:
        """A vision encoder has no tokenizer."""
        self.tokenizer = None

    def find_tokenizer(self, tokenizer: Any) -> None:
        """A vision encoder has no tokenizer."""

    @property
    def tree(self) -> VisionConfig:
        """The component configs of the model."""
        assert isinstance(self.cfg.tree, VisionConfig)  # checked when it was built
        return self.cfg.tree

    def forward(
        self,
        pixel_values: Pixels | None = None,
        return_type: str | None = "output",
        *,
        interpolate_pos_encoding: bool = False,
        **images: Tensor,
    ) -> Any:
        """Runs the tower on images.

        Args:
            pixel_values: images as the processor of the checkpoint makes them, [image, channel, height, width] or one image;
                of towers that read patches, such as Qwen's, [patch, d_patch]; or a list of images [channel, height, width].
            return_type: "embeddings", the stream after the last norm [image, pos, d_model]; "pooled" [image, d_model];
                "projected" [image, d_out], as texts are compared with it; "logits" [image, class]; "tokens" [image, token,
                d_out] of a merger, 0 where an image has fewer than others; None. The default, "output", means the last of these
                that the model has a head for.
            interpolate_pos_encoding: accept images of another size, with positions between the learned ones.
            images: what else describes the images, under the names that the processor gives it.

        Raises ValueError for images that do not fit, and for a return type whose head is absent; TypeError for pictures, and
        for pixels that are not floating point.
        """
        return_type = self.main_return_type if return_type == "output" else return_type
        self._check_return_type(return_type)
        apply_config_flags(self)
        patches = patches_of(self.tree, self.embed, {"pixel_values": pixel_values, **images}, interpolate_pos_encoding)
        merger = self.tree.merger
        layers = (len(self.blocks), *merger.depths) if isinstance(merger, DeepstackMerger.Config) else None
        read, context = self.read(patches, layers, "bicubic" if interpolate_pos_encoding else None)
        embeddings = read[..., : self.tree.embed.d_model]  # the streams of other depths are beside it
        pooled = None if self.pooler is None else self.pooler(embeddings, context.real)
        projected = None if self.projection is None else self.projection(pooled)
        logits = None if self.classifier is None else self.classifier(pooled)
        tokens = None if self.merger is None else self._tokens(read, patches)
        found = {"embeddings": embeddings, "pooled": pooled, "projected": projected, "logits": logits, "tokens": tokens}
        return None if return_type is None else found[return_type]

    def _tokens(self, read: Stream, patches: Patches) -> Float[Tensor, "image token d_out"]:
        """The tokens that the merger makes of images."""
        assert self.merger is not None, "checked by the caller"
        features: ImageFeatures = self.merger(read, patches, self.embed.cfg.n_before)
        return features.vectors if features.real is None else features.vectors * features.real[..., None]

    @property
    def main_return_type(self) -> str:
        """What a run returns by default."""
        heads = {"tokens": self.merger, "logits": self.classifier, "projected": self.projection, "pooled": self.pooler}
        return next((name for name, head in heads.items() if head is not None), "embeddings")

    def _check_return_type(self, return_type: str | None) -> None:
        heads = {"pooled": "pooler", "projected": "projection", "logits": "classifier", "tokens": "merger"}
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type must be one of {', '.join(map(repr, RETURN_TYPES))}, got {return_type!r}")
        if return_type in heads and getattr(self, heads[return_type]) is None:
            raise ValueError(f"this model has no {heads[return_type]}, which return_type={return_type!r} needs")

    def drawn_images(self, n_images: int = 2, seed: int = 0) -> dict[str, Tensor]:
        """Random images of the size that the tower was made for, as arguments of a run; the same on every call."""
        generator = torch.Generator().manual_seed(seed)
        return self.tree.pixels.drawn(self.tree.embed, self.tree.grid, n_images, generator)

    def verify(self, **images: Tensor) -> Verification:
        """Checks the identities between this model's sites, on random images by default; see `verification.verify`."""
        images = images or self.drawn_images()
        return verify(self, (), lambda at, output: vision_identities(self, at, output), **images)
