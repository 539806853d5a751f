"""Sites before the blocks of a model that reads images, as those of its vision tower, in sweeps.

A change there changes the stream that enters the blocks at the tokens of images, and what images add to it later. The tower runs
for several cells at once; each then is a cell whose stream differs from there on, and shares the rest with the base run.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.edit import Cell, Change, Input
from hooked_lm.engine.full_forward import writer
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.vision.inputs import Rows, VisionInputs, ids_of, repeated_rows
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.results import Label

OF_IMAGES = ("vision.", "projector.", "hook_image_features")
FIRST_STREAM = "blocks.0.hook_resid_pre"


def is_of_images(model: HookedRootModule, site: str) -> bool:
    """Whether the batch of a site are images."""
    return isinstance(model, VisionLanguage) and site.startswith(OF_IMAGES)


def is_before_blocks(model: HookedRootModule, site: str) -> bool:
    """Whether a change at a site changes the blocks by what images, or embeddings, give to them."""
    return is_of_images(model, site) or (isinstance(model, VisionLanguage) and site.startswith("hook_embed"))


@torch.no_grad()
def shapes_at(model: HookedRootModule, rows: Rows, sites: Collection[str] | None = None) -> dict[str, torch.Size]:
    """The shapes of values at sites whose batch are images; by default at all that are not on demand."""
    if not isinstance(model, VisionLanguage) or not isinstance(rows, VisionInputs) or not rows.images:
        return {}
    found: dict[str, torch.Size] = {}

    def record(value: Tensor, hook: HookPoint) -> None:
        found[hook.name or ""] = value.shape

    record.records = True  # type: ignore[attr-defined]
    names = [name for name, point in model.all_points().items() if not point.on_demand] if sites is None else sites
    if not (names := [name for name in names if is_of_images(model, name)]):
        return {}
    with model.hooks(fwd_hooks=[(name, record) for name in names]):
        model.image_features(rows.images)
    return found


def rows_and_positions(model: HookedRootModule, rows: Rows, site: str) -> tuple[int, int]:
    """The numbers of rows and of positions at a site: prompts and tokens, or images and patches.

    Raises ValueError for a site of images in a run without images.
    """
    if not is_of_images(model, site):
        return rows.shape[0], rows.shape[1]
    if (shape := shapes_at(model, rows, [site]).get(site)) is None:
        raise ValueError(f"'{site}' has values of images, and the prompts have none")
    return shape[0], n_positions(shape, model.hook_dict[site].dims)


def has_one_image_each(model: HookedRootModule, rows: Rows, n_images: int) -> bool:
    """Whether each prompt has one of so many images."""
    assert isinstance(model, VisionLanguage), "a model with sites of images"
    return n_images == len(rows) and bool(model.images_among(ids_of(rows)).any(1).all())


def n_positions(shape: torch.Size, dims: tuple[str, ...]) -> int:
    """The number of positions of a value at a site with these axes; of scores and patterns those of queries."""
    return shape[dims.index("query_pos") if "query_pos" in dims else 1]


@torch.no_grad()
def patch_labels(model: VisionLanguage, rows: VisionInputs, n_pos: int) -> list[Label]:
    """Labels of the positions of images: "row,column", and a number for what is no place of the image, as a class token.

    Numbers alone if images have different grids, or if neither the patches nor the tokens of images are so many.
    """
    pixels, embed = model.tree.vision.pixels, model.vision.embed
    patches = pixels.patches(embed, **rows.images)
    for cells in (patches.cells, model.image_features(rows.images).cells):
        n_before = n_pos - cells.shape[1]
        if n_before in (0, embed.cfg.n_class_tokens) and bool((cells == cells[:1]).all()):
            return [*range(n_before), *(_place(cell, n_before + i) for i, cell in enumerate(cells[0, :, -2:]))]
    return list(range(n_pos))


def _place(cell: Int[Tensor, " 2"], number: int) -> Label:
    row, column = cell.tolist()
    return f"{row},{column}" if row >= 0 else number


def entering(base: BaseRun, shared: Cell, cells: Sequence[Cell]) -> list[list[Change]]:
    """The cells, with what their changes before the blocks make of the stream that enters them in place of these changes.

    `shared` are the changes of the base run.
    """
    model = base.model
    early = [[change for change in (*shared, *cell) if is_before_blocks(model, change.site)] for cell in cells]
    sites = dict.fromkeys(change.site for cell in early for change in cell)
    with model.hooks(fwd_hooks=[(site, writer(site, early)) for site in sites]):
        stream, _, context = model.embedded(repeated_rows(base.tokens, len(cells)))
    new = {FIRST_STREAM: stream, **_deepstack(context)}
    old = {FIRST_STREAM: base.streams[0], **_deepstack(base.context)}
    found: list[list[Change]] = []
    for index, cell in enumerate(cells):
        of_cell = slice(index * base.n_prompts, (index + 1) * base.n_prompts)
        inputs = [_input(site, value[of_cell], old[site]) for site, value in new.items()]
        later = [change for change in cell if not is_before_blocks(model, change.site)]
        found.append([*(each for each in inputs if each.positions), *later])
    return found


def _deepstack(context: Context) -> dict[str, Tensor]:
    assert isinstance(context, ImageContext), "the context of a model that reads images"
    return {f"blocks.{layer}.hook_deepstack": term for layer, term in enumerate(context.deepstack_terms)}


def _input(site: str, new: Tensor, old: Tensor) -> Input:
    """The new value of a site before all changes of the site, where it differs."""
    differs = (new != old).any(-1).any(0)
    return Input(site, new, tuple(differs.nonzero()[:, 0].tolist()))
