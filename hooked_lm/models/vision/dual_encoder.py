"""A dual encoder: a tower for images, one for texts, and the similarity of their vectors."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.hooks import HookPoint
from hooked_lm.models.aliases import aliases
from hooked_lm.models.base import BaseModel, is_outside_blocks
from hooked_lm.models.caches.activation_cache import NamedCache
from hooked_lm.models.config.flat_vision import HookedDualEncoderConfig
from hooked_lm.models.config.tree import DualEncoderConfig
from hooked_lm.models.names import site_name
from hooked_lm.models.stack import apply_config_flags
from hooked_lm.models.text.encoder import EncoderText, texts_of
from hooked_lm.models.text.tokens import padded
from hooked_lm.models.verification.dual_identities import dual_encoder_identities
from hooked_lm.models.verification.verify import Verification, verify
from hooked_lm.models.vision.inputs import ImagesAndTexts, Pixels, VisionInputs
from hooked_lm.models.vision.text_tower import TextTower
from hooked_lm.models.vision.tower import VisionTower, patches_of

Ids = Int[Tensor, "*text pos"]
Text = str | Sequence[str] | Ids
Mask = Int[Tensor, "*text pos"] | Bool[Tensor, "*text pos"]
Embeds = Float[Tensor, "batch d_out"]
RETURN_TYPES = ("logits_per_image", "logits_per_text", "image_embeds", "text_embeds", None)


class ImageTower(VisionTower):
    """The side of a dual encoder that reads images."""

    def embeds(self, pixel_values: Pixels, interpolate: bool) -> Embeds:
        """The vectors of images, before they are normalised."""
        patches = patches_of(self.tree, self.embed, {"pixel_values": pixel_values}, interpolate)
        resid, context = self.read(patches, None, "bicubic" if interpolate else None)
        pooled = self.pooler(resid, context.real)
        return pooled if self.projection is None else self.projection(pooled)


class DualEncoder(EncoderText, BaseModel):
    """A tower for images and one for texts (CLIP, SigLIP), in which every intermediate value has a name.

    Sites of the towers begin with "vision." and "text.". `hook_image_features` and `hook_text_features` are the vectors of
    images and texts, `hook_image_embeds` and `hook_text_embeds` these with length 1, and `hook_logits_per_image` [image, text]
    `exp(logit_scale) image_embeds text_embeds^T + logit_bias`. `hooked_lm.HookedDualEncoder` adds loading and saving of
    checkpoints.
    """

    config_class = HookedDualEncoderConfig
    cache_class = NamedCache
    stacks = ()  # each tower has its own
    sites_of_images = ("vision.", "hook_image_features")

    def __init__(self, cfg: HookedDualEncoderConfig, tokenizer: Any = None, move_to_device: bool = True) -> None:
        super().__init__()
        self._set_config(cfg, tokenizer)
        with self._initial_device(move_to_device):
            self.vision = ImageTower(self.tree.vision)
            self.text = TextTower(self.tree.text)
            self.hook_image_embeds = HookPoint("batch", "d_out")
            self.hook_text_embeds = HookPoint("batch", "d_out")
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
            self.logit_bias = nn.Parameter(torch.zeros(())) if self.tree.logit_bias else None
            self.hook_logits_per_image = HookPoint("image", "text")
        self._finish()

    @property
    def tree(self) -> DualEncoderConfig:
        """The component configs of the model."""
        assert self.cfg.tree is not None  # checked when it was built
        return self.cfg.tree

    @property
    def embed(self) -> Any:
        """The embedding of tokens."""
        return self.text.embed

    @property
    def blocks(self) -> Any:
        """The blocks of the text tower, which flat names describe."""
        return self.text.blocks

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the weights; `cfg.device` before there are any."""
        is_built = "text" in self.__dict__.get("_modules", {})
        return self.text.embed.W_E.device if is_built else torch.device(self.cfg.device)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Text | VisionInputs | None = None,
        pixel_values: Pixels | None = None,
        return_type: str | None = "logits_per_image",
        *,
        input_ids: Ids | None = None,
        attention_mask: Mask | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> Any:
        """Runs the towers on texts and images.

        Args:
            input, input_ids: texts, or token ids [text, pos] or [pos]; or `VisionInputs`, texts with images.
            pixel_values: images as the processor of the checkpoint makes them, [image, channel, height, width] or one image.
            return_type: "logits_per_image" [image, text], the default; "logits_per_text" [text, image]; "image_embeds" or
                "text_embeds", the normalised vectors of one side, which need that side alone; None.
            attention_mask: 1 for real tokens and 0 for padding, [text, pos]; by default all are real.
            interpolate_pos_encoding: accept images of another size, with positions between the learned ones.

        Raises ValueError for inputs that do not fit, for a side that is missing, and for an unknown return type.
        """
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type must be one of {', '.join(map(repr, RETURN_TYPES))}, got {return_type!r}")
        if input is not None and input_ids is not None:
            raise ValueError("input and input_ids are synonyms: give one of them")
        if isinstance(input, VisionInputs):
            if pixel_values is not None or attention_mask is not None:
                raise ValueError("pixel_values and attention_mask are part of VisionInputs: leave them out")
            inputs = self._collected(input)
            input, pixel_values, attention_mask = None, inputs.images["pixel_values"], inputs.attention_mask
            input_ids = inputs.tokens
        text = input if input_ids is None else input_ids
        given = {"image": pixel_values, "text": text}
        wanted = {"image_embeds": ["image"], "text_embeds": ["text"]}.get(str(return_type), ["image", "text"])
        if missing := [side for side in wanted if given[side] is None]:
            raise ValueError(
                f"return_type={return_type!r} needs images and texts, and the {missing[0]}s are missing; encode_image and "
                "encode_text run one side"
            )
        image_embeds = None if pixel_values is None else self.encode_image(pixel_values, interpolate_pos_encoding)
        text_embeds = None if text is None else self.encode_text(text, attention_mask)
        if image_embeds is None or text_embeds is None:
            return image_embeds if text_embeds is None else text_embeds
        logits = self.hook_logits_per_image(self.similarity(image_embeds, text_embeds))
        found = {"image_embeds": image_embeds, "text_embeds": text_embeds, None: None}
        return {**found, "logits_per_image": logits, "logits_per_text": logits.T}[return_type]

    def inputs(self, given: VisionInputs) -> ImagesAndTexts:
        """Texts and images as token ids [text, pos] and pixels that are ready. Raises ValueError unless there are both."""
        found, vision = self._collected(given), self.tree.vision
        return replace(found, images=vision.pixels.ready(vision.embed, found.images))

    def _collected(self, given: VisionInputs) -> ImagesAndTexts:
        """Texts as token ids, and images as they were given."""
        if set(given.images) != {"pixel_values"}:
            raise ValueError(
                f"a {type(self).__name__} compares texts with images={{'pixel_values': ...}}, got images with "
                f"{', '.join(given.images) or 'no tensors'}"
            )
        tokens = (
            self._ids(given.tokens).to(self.device)
            if isinstance(given.tokens, Tensor)
            else self.to_tokens(given.tokens, truncate=False)
        )
        mask = None if given.attention_mask is None else given.attention_mask.reshape(tokens.shape)
        return ImagesAndTexts(tokens, given.images, mask)

    def encode_image(self, pixel_values: Pixels, interpolate_pos_encoding: bool = False) -> Embeds:
        """The vectors of images, of length 1. Images as for `forward`."""
        apply_config_flags(self)
        return self.hook_image_embeds(unit(self.vision.embeds(pixel_values, interpolate_pos_encoding)))

    def encode_text(self, input: Text, attention_mask: Mask | None = None) -> Embeds:
        """The vectors of texts or token ids, of length 1."""
        apply_config_flags(self)
        tokens = (
            self._ids(input).to(self.device) if isinstance(input, Tensor) else self.to_tokens(input, truncate=False)
        )
        mask = attention_mask if attention_mask is None or attention_mask.ndim == 2 else attention_mask[None]
        return self.hook_text_embeds(unit(self.text(tokens, mask)))

    def similarity(
        self, image_embeds: Float[Tensor, "image d_out"], text_embeds: Float[Tensor, "text d_out"]
    ) -> Float[Tensor, "image text"]:
        """The logit of each pair of vectors."""
        logits = (text_embeds @ image_embeds.T).T * self.logit_scale.exp()
        return logits if self.logit_bias is None else logits + self.logit_bias

    # ---- text --------------------------------------------------------------------------------------------------------

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> Int[Tensor, "text pos"]:
        """The ids of texts with the special tokens of the tokenizer, padded on the right.

        All have `n_ctx` tokens if the model was trained so (SigLIP), otherwise as many as the longest.
        """
        rows = [self._row(text, truncate)[0] for text in texts_of(input if isinstance(input, str) else list(input))]
        tokens, _ = padded(rows, self.tokens.pad_id, "right")
        if self.tree.text.pads_to_n_ctx:
            tokens = F.pad(tokens, (0, max(self.cfg.n_ctx - tokens.shape[1], 0)), value=self.tokens.pad_id)
        return tokens.to(self.device) if move_to_device else tokens

    # ---- sites -------------------------------------------------------------------------------------------------------

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """Alias -> site: names of other libraries after "vision." or "text.", and the vectors before they have length 1."""
        found = {"hook_text_features": "text.projection.hook_out"}
        last = "pooler.hook_pooler_out" if self.vision.projection is None else "projection.hook_out"
        found["hook_image_features"] = f"vision.{last}"
        for side, tower in (("vision.", self.vision), ("text.", self.text)):
            own = [name.removeprefix(side) for name in names if name.startswith(side)]
            n_layers = len(tower.stack.blocks_of(tower))
            found |= {side + alias: side + site for alias, site in aliases(own, n_layers).items()}
        return found

    def site_name(self, site: object) -> str:
        """The full name of a site given as ("vision.z", layer) or ("text.z", layer); full names are returned unchanged."""
        if not isinstance(site, tuple):
            return str(site)
        name, *rest = site
        side, _, short = name.partition(".")
        if side not in ("vision", "text") or not short:
            raise KeyError(f"a short name begins with its side, as in ('vision.z', 0), got {site!r}")
        return f"{side}.{site_name((short, *rest), len(getattr(self, side).blocks))}"

    def stack_of(self, name: str) -> tuple[str, int]:
        """The stack of a site with this short name; see `BaseModel.stack_of`."""
        if is_outside_blocks(self, name):
            return name, 0
        side = name.partition(".")[0]
        if side not in ("vision", "text"):
            raise KeyError(f"a site of a dual encoder is named with its side: 'vision.{name}' or 'text.{name}'")
        return side, len(getattr(self, side).blocks)

    # ---- verification ------------------------------------------------------------------------------------------------

    def drawn_inputs(self, n: int = 2, seed: int = 0) -> tuple[Int[Tensor, "text pos"], dict[str, Tensor]]:
        """Random texts and images of the sizes that the model was made for; the same on every call."""
        generator, text, tower = torch.Generator().manual_seed(seed), self.tree.text, self.tree.vision
        n_pos = text.n_ctx if text.pads_to_n_ctx else min(text.n_ctx, 8)
        tokens = torch.randint(text.embed.d_vocab, (n, n_pos), generator=generator)
        if (end := getattr(text.pooler, "end", None)) is not None:
            tokens[:, n_pos // 2] = end
        return tokens, tower.pixels.drawn(tower.embed, tower.grid, n, generator)

    def verify(self, tokens: Ids | None = None, **images: Tensor) -> Verification:
        """Checks the identities between this model's sites, on random texts and images by default."""
        drawn_tokens, drawn_images = self.drawn_inputs()
        ids = self._ids(drawn_tokens if tokens is None else tokens).to(self.device)
        return verify(
            self, (ids,), lambda at, logits: dual_encoder_identities(self, at, logits, ids), **(images or drawn_images)
        )


def unit(x: Embeds) -> Embeds:
    """The vectors with length 1."""
    return x / x.norm(dim=-1, keepdim=True)
