"""Flat names of models that read images: towers, vision-language models, dual encoders."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from hooked_lm.models.config import read
from hooked_lm.models.config.build import vision_language
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat_config import remembers
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.row import DECODER, DUAL_ENCODER, VISION, of_tree, table
from hooked_lm.models.config.tree import DecoderConfig, DualEncoderConfig, VisionConfig, VisionLanguageConfig


@remembers
@dataclass(repr=False)
class HookedVisionConfig(HookedTransformerConfig):
    """The config of a vision tower, as flat names.

    `HookedVisionConfig(n_layers=2, d_model=64, n_heads=4, image_size=32, patch_size=8, act_fn="gelu")` describes a ViT
    (Dosovitskiy et al. 2020, arXiv:2010.11929) to build; with `n_classes` it has a classifier.
    """

    kind: ClassVar[str] = VISION
    needed = {"image_size": "image_size is missing: give it in the config"}

    # fmt: off
    n_ctx: int = of_tree("longest input, in class tokens and patches", "n_ctx", default=-1, least=1, kinds=(VISION,),
                         follows=lambda image_size, patch_size, n_class_tokens:
                         -1 if image_size is None else (image_size // patch_size) ** 2 + n_class_tokens)
    image_size: int | None = of_tree("height of images, in pixels; None: any", "", default=None, read=read.image_size,
                                     kinds=(VISION,))
    patch_size: int = of_tree("height and width of a patch, in pixels", "embed.patch_size", default=16, least=1,
                              kinds=(VISION,))
    n_channels: int = of_tree("channels of an image", "embed.n_channels", default=3, least=1, kinds=(VISION,))
    n_class_tokens: int = of_tree("positions before those of patches", "embed.n_class_tokens", default=1, least=0,
                                  kinds=(VISION,))
    n_classes: int | None = of_tree("classes of images; None: there is no classifier", "classifier.n_classes", default=None,
                                    kinds=(VISION,))
    # fmt: on
    attention_dir: str = "bidirectional"
    eps: float = 1e-12
    tree: VisionConfig | None = field(default=None, repr=False)  # type: ignore[assignment]


@remembers
@dataclass(repr=False)
class HookedVisionLanguageConfig(HookedTransformerConfig):
    """The config of a vision-language model. Flat names describe the decoder; `tree` also has the tower and the projector.

    With `vision`, the flat names of a tower (those of `HookedVisionConfig`), and `image_token` they describe a model like LLaVA
    (Liu et al. 2023, arXiv:2310.03744) to build: an MLP between the tower's normalised output and the decoder.

    >>> tower = dict(
    ...     n_layers=1, d_model=16, n_heads=2, image_size=8, patch_size=4, act_fn="gelu"
    ... )
    >>> sizes = dict(
    ...     n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu"
    ... )
    >>> cfg = HookedVisionLanguageConfig(**sizes, vision=tower, image_token=999)
    >>> cfg.tree.projector.d_vision, cfg.tree.projector.d_model
    (16, 64)
    """

    needed = {
        "vision": "vision is missing: give the flat names of the tower, vision=dict(...)",
        "image_token": "image_token is missing: give the id of the tokens that images replace",
        **HookedTransformerConfig.needed,
    }
    # fmt: off
    vision: Any = of_tree("the vision tower: a dict of its flat names, a config or a tree", "vision", default=None,
                          kinds=(DECODER,), spelling=lambda value, c: tower_of(value))
    image_token: int = of_tree("id of the tokens that images replace", "image_token", default=-1, least=0, kinds=(DECODER,))
    # fmt: on
    tree: VisionLanguageConfig | None = field(default=None, repr=False)

    @classmethod
    def _whole(cls, tree: Tree, c: SimpleNamespace) -> Tree | None:
        """The tree of a LLaVA with this decoder."""
        assert isinstance(tree, DecoderConfig)  # of the flat names
        tower = None if c.image_token == -1 else tower_of(c.vision)
        if c.image_token >= c.d_vocab:
            raise ValueError(f"image_token={c.image_token} is no token: the ids of d_vocab={c.d_vocab} end before it")
        return None if tower is None else vision_language(c, tree, tower)


def tower_of(given: dict[str, Any] | HookedVisionConfig | VisionConfig | None) -> VisionConfig | None:
    """The tree of a tower without heads. Raises ValueError for flat names that are of a model, not of a tower."""
    if isinstance(given, dict):
        of_model = {name for name, row in table(HookedVisionConfig).rows.items() if row.is_fact or name == "n_classes"}
        if whole := of_model & given.keys():
            raise ValueError(
                f"vision={{{min(whole)!r}: ...}}: a tower inside of a model has no {min(whole)} of its own"
            )
        given = HookedVisionConfig.from_dict(given)
    if isinstance(given, HookedVisionConfig):
        given.check_tree()
        given = given.tree
    return None if given is None else replace(given, pooler=None, projection=None, classifier=None)


@remembers
@dataclass(repr=False)
class HookedDualEncoderConfig(HookedTransformerConfig):
    """The config of a dual encoder, which is made from a tree. Flat names describe the text tower."""

    kind: ClassVar[str] = DUAL_ENCODER
    needed = {"tree": "a dual encoder is built from a tree: HookedDualEncoderConfig.from_tree(DualEncoderConfig(...))"}
    tree: DualEncoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]
