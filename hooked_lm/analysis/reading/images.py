"""Readings of the tokens of images in a vision-language model: nearest words, attention to them, values over the picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.lens import spelled
from hooked_lm.engine.cells_before_blocks import patch_labels
from hooked_lm.engine.prompts import AxisSelection, chosen, rows_of, site_of_layer
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.vision.inputs import VisionInputs, ids_of
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.results import Label
from hooked_lm.results.labels import headline, over_image
from hooked_lm.results.scores import Scores, provenance

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")


@dataclass(frozen=True, eq=False, repr=False)
class ImageScores(Scores):
    """Numbers over the patches of an image, which `plot` draws over it.

    Args:
        image: [channel, height, width], that of the only prompt; None for several prompts.

    >>> patches = ["0,0", "0,1", "1,0", "1,1"]
    >>> scores = ImageScores(
    ...     torch.rand(2, 4, 1),
    ...     {"layer": [0, 1], "patch": patches},
    ...     image=torch.rand(3, 8, 8),
    ... )
    >>> [panel.text for panel in scores.plot().layout.annotations]
    ['image', 'layer 0', 'layer 1']
    """

    image: Float[Tensor, "channel height width"] | None = None

    def _pictured(self) -> dict[str, Any]:
        common = {
            "title": headline(self._measured(), self.axes),
            "subtitle": "",
            "value_name": self._measured() or "value",
        }
        return {**common, "baselines": [{}], "image": self.image}


@torch.no_grad()
def nearest_words(
    model: VisionLanguage, prompts: VisionInputs, *, layers: AxisSelection = "each", site: str = "resid_pre", k: int = 5
) -> "pd.DataFrame":
    """The words whose embeddings are nearest to the stream at the tokens of images, before each layer.

    A row for each prompt, layer, image token and rank, with the cosine of the angle between the stream and the embedding. Before
    layer 0 the stream is what the projector gives to the text.

    Raises ValueError for prompts without images and for a model with several streams; IndexError for a layer out of range.

    >>> from hooked_lm import HookedVisionLanguage, VisionInputs
    >>> from hooked_lm.demo.shapes import Picture, pixels
    >>> model = HookedVisionLanguage.from_pretrained("demo-shapes")
    >>> tokens = model.to_tokens(
    ...     "<image> " * 36 + "what colour is the shape in the upper right ?"
    ... )
    >>> prompt = VisionInputs(
    ...     tokens, {"pixel_values": pixels(Picture((("circle", "red"),) * 4))[None]}
    ... )
    >>> table = nearest_words(model, prompt, layers=[0], k=2)
    >>> list(table.columns), len(table)
    (['prompt', 'layer', 'position', 'rank', 'token', 'id', 'cosine'], 72)
    """
    refuse_two_stacks(model, "nearest_words")
    check_one_stream(model, "nearest_words")
    if not 1 <= k <= model.cfg.d_vocab:
        raise ValueError(f"k must be from 1 to {model.cfg.d_vocab}, the size of the vocabulary, got {k}")
    which, found = chosen(layers, model.cfg.n_layers, "layer"), list[pd.DataFrame]()
    rows, is_image = _with_images(model, prompts)
    sites = {layer: model.names((site, layer))[0] for layer in which or ()}
    _, cache = model.run_with_cache(rows, names_filter=list(sites.values()), return_type=None)
    embeddings = torch.nn.functional.normalize(model.W_E.float(), dim=-1)
    prompt, position = is_image.nonzero(as_tuple=True)
    for layer, name in sites.items():
        stream = torch.nn.functional.normalize(cache[name][prompt, position].float(), dim=-1)
        best = (stream @ embeddings.T).topk(k)
        words = spelled(model, best.indices)
        columns = {
            "prompt": prompt.repeat_interleave(k).tolist(),
            "layer": layer,
            "position": position.repeat_interleave(k).tolist(),
            "rank": list(range(k)) * len(prompt),
            "token": [words[token] for token in best.indices.flatten().tolist()],
            "id": best.indices.flatten().tolist(),
            "cosine": best.values.flatten().tolist(),
        }
        found.append(pd.DataFrame(columns))
    return pd.concat(found, ignore_index=True).sort_values(["prompt", "layer", "position", "rank"], ignore_index=True)


@torch.no_grad()
def attention_to_images(
    model: VisionLanguage, prompts: VisionInputs, *, positions: Indices = -1, layers: AxisSelection = "each"
) -> ImageScores:
    """How much each head attends from a position, by default that of the answer, to the tokens of images; from several: the mean.

    Returns Scores with the axes layer, head and patch, whose `plot` draws them over the image of a single prompt; `on_image`
    folds them into rows and columns. Layers without patterns are left out. Raises ValueError for prompts without images, or with
    different numbers of image tokens; IndexError for a position or layer out of range.
    """
    rows, is_image = _with_images(model, prompts)
    counts = is_image.sum(1).tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"the prompts must have the same number of image tokens; these have {counts}")
    queries = indices_in("positions", plain_indices("positions", positions), rows.shape[1])
    which = chosen(layers, model.cfg.n_layers, "layer") or []
    sites = {layer: site for layer in which if (site := site_of_layer(model, "pattern", layer)) is not None}
    _, cache = model.run_with_cache(rows, names_filter=list(sites.values()), return_type=None)
    at = torch.stack([row.nonzero()[:, 0] for row in is_image])  # batch, token
    weights = [_picked(cache[site][:, :, queries].mean(2), at) for site in sites.values()]
    values = torch.stack([weight.permute(1, 2, 0) for weight in weights])
    axes: dict[str, Sequence[Label]] = {"layer": list(sites), "head": list(range(values.shape[1]))}
    pixels = rows.images.get("pixel_values") if isinstance(rows.images, Mapping) else None
    image = pixels[0] if pixels is not None and pixels.ndim == 4 and len(pixels) == len(ids_of(rows)) == 1 else None
    about = provenance(model, of="attention", positions=queries)
    axes["patch"] = patch_labels(model, rows, counts[0])
    return ImageScores(values, axes, about=about, image=image)


def _picked(
    pattern: Float[Tensor, "batch head key_pos"], at: Int[Tensor, "batch token"]
) -> Float[Tensor, "batch head token"]:
    return pattern.gather(2, at[:, None].expand(-1, pattern.shape[1], -1))


def on_image(scores: Scores) -> Float[Tensor, "*axis row column"]:
    """The means of scores with an axis "patch", over the picture: that axis becomes two, row and column, which are the last.

    Labels without a place, as those of class tokens, are left out; places without a label are NaN. Raises ValueError if there is
    no such axis, or no label is a place.

    >>> on_image(Scores(torch.tensor([[9.0], [1.0], [2.0]]), {"patch": [0, "0,0", "1,0"]}))
    tensor([[1.],
            [2.]])
    """
    names = list(scores.axes)
    picture = (
        over_image(scores.mean.movedim(names.index("patch"), -1), scores.axes["patch"]) if "patch" in names else None
    )
    if picture is None:
        raise ValueError(f"the scores have no axis 'patch' with rows and columns; their axes are {', '.join(names)}")
    return picture


def _with_images(model: VisionLanguage, prompts: VisionInputs) -> tuple[VisionInputs, Tensor]:
    """What the model reads, and which of its tokens are of images."""
    refuse_two_stacks(model, "this function")
    rows = rows_of(model, model.inputs(prompts))
    is_image = model.images_among(ids_of(rows).to(model.device))
    if not isinstance(rows, VisionInputs) or not rows.images or not bool(is_image.any()):
        raise ValueError("the prompts have no images: give VisionInputs with the tensors of images")
    return rows, is_image
