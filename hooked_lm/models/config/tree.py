"""The architecture of a model as a tree of component configs: decoders, encoders, encoder-decoders, models of images."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hooked_lm.components.attention.disentangled import RelativeEmbed
from hooked_lm.components.attention.global_tokens import GlobalTokens
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import CrossBlockConfig
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbedConfig
from hooked_lm.components.embeddings.stored_rotary import RotaryTable, StoredRotary
from hooked_lm.components.heads import (
    Classifier,
    ContactHead,
    EndToken,
    LastToken,
    MLMHead,
    NSPHead,
    Pooler,
    TokenClassifier,
)
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.components.vision.heads import ClassAndMean, ClassToken, ProbePooler, Projection
from hooked_lm.components.vision.image_rules import ImageRule
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.components.vision.patch_embed import BucketPosEmbed, ImagePosEmbed, PatchEmbed
from hooked_lm.components.vision.patches import Patches
from hooked_lm.components.vision.pixel_format import PixelFormat
from hooked_lm.components.vision.pixels import PixelImages
from hooked_lm.models.config.fit import check_fit, check_tied

SideBlockConfig = PreNormBlock.Config | PostNormBlock.Config | CrossBlockConfig


@runtime_checkable
class ModuleConfig(Protocol):
    """The config of a module that few families have."""

    def build(self) -> nn.Module:
        """The module."""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embeddings, a tuple of blocks (they may differ), a final norm, an unembedding.

    `n_ctx` is the longest prompt. With `shortformer` the position embedding is added to the inputs of queries and keys
    instead of the stream (Press et al. 2020, arXiv:2012.15832). `per_layer` makes a second input of each layer from the tokens
    and their embedding: a second embedding with a vector for each layer, the same one again, or the ids themselves. `layout` is
    a number that tells apart the layouts in which a family's tensors may be written.
    """

    n_ctx: int
    embed: Embed.Config
    blocks: tuple[Any, ...]  # configs of any kinds of blocks
    unembed: Unembed.Config
    pos_embed: PosEmbedConfig | None = None
    ln_final: NormConfig | None = None
    shortformer: bool = False
    per_layer: ModuleConfig | None = None
    layout: int = 0

    def __post_init__(self) -> None:
        check_tied(self.unembed, self.embed)
        check_fit(self.blocks)


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder: embeddings, a tuple of blocks (they may differ), an optional final norm, and optional heads.

    `n_ctx` is the longest text. All layers share `rel_pos_bias`, a bias on the scores, `rel_embed`, a table of relative
    positions, and the frequencies or angles of `rotary`. With `global_tokens` some tokens may have global attention. `shares`
    has a key for each block: blocks with the same key share weights. `layout` is a number that
    tells apart the tensor names of a family that uses several sets of them.
    """

    n_ctx: int
    embed: EncoderEmbed.Config
    blocks: tuple[Any, ...]  # configs of any kinds of blocks
    ln_final: NormConfig | None = None
    rel_pos_bias: RelativeBias.Config | None = None
    rel_embed: RelativeEmbed.Config | None = None
    rotary: StoredRotary.Config | RotaryTable.Config | None = None
    global_tokens: GlobalTokens.Config | None = None
    shares: tuple[tuple[int, int], ...] | None = None
    mlm_head: MLMHead.Config | None = None
    unembed: Unembed.Config | None = None
    pooler: Pooler.Config | None = None
    nsp_head: NSPHead.Config | None = None
    classifier: Classifier.Config | None = None
    token_classifier: TokenClassifier.Config | None = None
    contact_head: ContactHead.Config | None = None
    layout: int = 0

    def __post_init__(self) -> None:
        if self.shares is not None and len(self.shares) != len(self.blocks):
            raise ValueError(
                f"shares says which weights {len(self.shares)} layers share, but there are {len(self.blocks)}"
            )
        if isinstance(self.rotary, RotaryTable.Config) and self.n_ctx > self.rotary.n_ctx:
            raise ValueError(f"n_ctx={self.n_ctx}: the table of rotary angles has {self.rotary.n_ctx} positions")
        check_tied(self.unembed, self.embed.embed)
        check_fit(self.blocks)


@dataclass(frozen=True)
class StackConfig:
    """The layers of an encoder, or of a decoder with cross-attention, with the modules before and after them.

    `ln_tokens` normalises the token embeddings, `ln_embed` their sum with the position embeddings. `rel_pos_bias` is a bias on
    the scores that all layers share; separate biases per layer are part of the attention configs. `n_ctx` is the longest input,
    if it is shorter than that of the model.
    """

    blocks: tuple[SideBlockConfig, ...]
    pos_embed: PosEmbedConfig | None = None
    ln_tokens: NormConfig | None = None
    ln_embed: NormConfig | None = None
    rel_pos_bias: RelativeBias.Config | None = None
    ln_final: NormConfig | None = None
    n_ctx: int | None = None


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder, a decoder that attends to its output, and an unembedding.

    `n_ctx` is the longest input of either. Without a `decoder_embed` encoder and decoder share one token embedding. A tied
    unembedding is tied to the decoder's embedding. `spare_embed` is an embedding in the checkpoint that no module uses. With
    `global_tokens` some tokens of the source may have global attention. `ngram_embed` adds further streams to that of the
    target, for a decoder of blocks between several.
    """

    n_ctx: int
    embed: Embed.Config
    encoder: StackConfig
    decoder: StackConfig
    unembed: Unembed.Config
    decoder_embed: Embed.Config | None = None
    spare_embed: Embed.Config | None = None
    global_tokens: GlobalTokens.Config | None = None
    ngram_embed: ModuleConfig | None = None

    def __post_init__(self) -> None:
        check_tied(self.unembed, self.decoder_embed or self.embed)
        check_fit(self.blocks)

    @property
    def blocks(self) -> tuple[SideBlockConfig, ...]:
        """The blocks of the encoder, then those of the decoder."""
        return self.encoder.blocks + self.decoder.blocks


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower: patches and positions, an optional norm of their sum, blocks, an optional final norm and heads.

    `n_ctx` is the largest number of class tokens and patches. `pooler` makes one vector of an image, which `projection` brings
    into the space of texts, and which `classifier` gives a score for each class. `merger` makes the tokens that a language model
    reads of an image. `pixels` says how images are given.
    """

    n_ctx: int
    embed: PatchEmbed.Config
    blocks: tuple[Any, ...]
    pos_embed: ImagePosEmbed.Config | BucketPosEmbed.Config | None = None
    ln_pre: NormConfig | None = None
    ln_final: NormConfig | None = None
    pooler: Pooler.Config | ClassToken.Config | ClassAndMean.Config | ProbePooler.Config | None = None
    projection: Projection.Config | None = None
    classifier: Classifier.Config | None = None
    merger: PatchMerger.Config | None = None
    pixels: PixelFormat = field(default_factory=PixelImages)
    layout: int = 0

    def __post_init__(self) -> None:
        check_fit(self.blocks)

    def check_sizes(self, patches: Patches, how: str = "") -> None:
        """Raises ValueError for an image without positions; `how` says what helps besides resizing it."""
        if isinstance(self.pos_embed, ImagePosEmbed.Config) and (why := self.pos_embed.misfit(patches)):
            raise ValueError(why + how)

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of patches that positions were learned for; 4 x 6 if they are computed."""
        return (4, 6) if self.pos_embed is None else (self.pos_embed.rows, self.pos_embed.columns)


@dataclass(frozen=True)
class VisionLanguageConfig(DecoderConfig):
    """A decoder that reads images: a vision tower, a projector into the decoder's stream, and the decoder itself.

    The projector reads the streams of the tower after `feature_layers` blocks each, side by side, or its normalised output if
    that is None. `image_token` is the id of the tokens that images replace. `rules` say what images change besides,
    `image_text` what prompts say around them. `text_type` and `vision_type` are the families of both sides.
    """

    vision: VisionConfig = field(kw_only=True)
    projector: Any = field(kw_only=True)
    image_token: int = field(kw_only=True)
    feature_layers: tuple[int, ...] | None = field(default=None, kw_only=True)
    rules: tuple[ImageRule, ...] = field(default=(), kw_only=True)
    image_text: ImageText = field(default=ImageText(), kw_only=True)
    text_type: str = field(kw_only=True)
    vision_type: str = field(kw_only=True)


@dataclass(frozen=True)
class TextTowerConfig:
    """A tower for texts: embeddings, blocks, a final norm, one position of it, and a projection.

    With `pads_to_n_ctx` texts are padded to `n_ctx` tokens, which the tower reads like others.
    """

    n_ctx: int
    embed: Embed.Config
    pos_embed: PosEmbedConfig
    blocks: tuple[Any, ...]
    ln_final: NormConfig
    pooler: EndToken.Config | LastToken.Config
    projection: Projection.Config
    pads_to_n_ctx: bool = False

    def __post_init__(self) -> None:
        check_fit(self.blocks)


@dataclass(frozen=True)
class DualEncoderConfig:
    """A tower for images and one for texts, whose vectors are compared. `vision_type` is the family of the first.

    The fields of a text tower, which flat names describe, are properties.
    """

    vision: VisionConfig
    text: TextTowerConfig
    vision_type: str
    logit_bias: bool = False

    def __post_init__(self) -> None:
        if self.vision.pooler is None:
            raise ValueError("the vision tower has no pooler, so there is no vector of an image to compare with texts")

    @property
    def n_ctx(self) -> int:
        """The longest text."""
        return self.text.n_ctx

    @property
    def embed(self) -> Embed.Config:
        """The embedding of tokens."""
        return self.text.embed

    @property
    def pos_embed(self) -> PosEmbedConfig:
        """The positions of tokens."""
        return self.text.pos_embed

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The blocks of the text tower."""
        return self.text.blocks

    @property
    def ln_final(self) -> NormConfig:
        """The final norm of the text tower."""
        return self.text.ln_final
