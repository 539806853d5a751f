"""Sites before the blocks of a model that reads images, as those of its vision tower, in sweeps.

A change there changes the stream that enters the blocks at the tokens of images, and what images add to it later. The tower runs
for several cells at once, from the first block that they change; each then is a cell whose stream differs from there on, and
shares the rest with the base run.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.cost import Cost, token_cost
from hooked_lm.engine.edit import Cell, Change, Input, repeated
from hooked_lm.engine.full_forward import passes, writer
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.inputs import ImagesAndTexts, Rows, TowerInputs, VisionInputs, ids_of, repeated_rows
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.results import Label

TOWER = "vision."
AFTER_BLOCKS = ("ln_final", "pooler")  # parts of a tower
FIRST_STREAM = "blocks.0.hook_resid_pre"


def is_of_images(model: HookedRootModule, site: str) -> bool:
    """Whether the batch of a site are images."""
    return site.startswith(getattr(model, "sites_of_images", ()))  # a wrapped module has none


def is_before_blocks(model: HookedRootModule, site: str) -> bool:
    """Whether a change at a site changes the blocks by what images, or embeddings, give to them."""
    of_images = getattr(model, "sites_of_images", ())
    return bool(of_images) and site.startswith((*of_images, "hook_embed"))


def in_tower(model: HookedRootModule, rows: Rows) -> Rows:
    """The rows of several runs, their images cut into patches once for all of them. A dual encoder reads pixels."""
    if not isinstance(rows, VisionInputs) or isinstance(rows, ImagesAndTexts) or not rows.images:
        return rows
    return replace(rows, images=model.vision.resolved(rows.images))


@torch.no_grad()
def shapes_at(model: HookedRootModule, rows: Rows, sites: Collection[str] | None = None) -> dict[str, torch.Size]:
    """The shapes of values at sites whose batch are images, or texts compared with images; by default at all that are not on
    demand."""
    pairs = isinstance(rows, ImagesAndTexts)
    if not isinstance(rows, VisionInputs) or not rows.images:
        return {}
    found: dict[str, torch.Size] = {}

    def record(value: Tensor, hook: HookPoint) -> None:
        found[hook.name or ""] = value.shape

    record.records = True  # type: ignore[attr-defined]
    names = [name for name, point in model.all_points().items() if not point.on_demand] if sites is None else sites
    if not (names := [name for name in names if pairs or is_of_images(model, name)]):
        return {}
    with model.hooks(fwd_hooks=[(name, record) for name in names]):
        if pairs:
            model(rows, return_type=None)
        else:
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
    return n_images == len(rows) and bool(model.images_among(ids_of(rows)).any(1).all())


def n_positions(shape: torch.Size, dims: tuple[str, ...]) -> int:
    """The number of positions of a value at a site with these axes; of scores and patterns those of queries."""
    return shape[dims.index("query_pos") if "query_pos" in dims else 1]


@torch.no_grad()
def patch_labels(model: VisionLanguage | DualEncoder, rows: VisionInputs, n_pos: int) -> list[Label]:
    """Labels of the positions of images: "row,column", and a number for what is no place of the image, as a class token.

    Numbers alone if images have different grids, or if neither the patches nor the tokens of images are so many.
    """
    embed, images = model.vision.embed, model.vision.resolved(rows.images)

    def of_images() -> Iterator[Int[Tensor, "image place 2"]]:
        yield images.patches.cells
        if isinstance(model, VisionLanguage):
            yield model.image_layout(images).cells

    for cells in of_images():
        n_before = n_pos - cells.shape[1]
        if n_before in (0, embed.cfg.n_class_tokens) and bool((cells == cells[:1]).all()):
            return [*range(n_before), *(_place(cell, n_before + i) for i, cell in enumerate(cells[0, :, -2:]))]
    return list(range(n_pos))


def _place(cell: Int[Tensor, " 2"], number: int) -> Label:
    row, column = cell.tolist()
    return f"{row},{column}" if row >= 0 else number


class BaseTower:
    """The tower in a base run with these changes, block by block: cells start at the first block that they change."""

    def __init__(self, base: BaseRun, shared: Cell) -> None:
        assert isinstance(base.model, VisionLanguage), "checked by the caller"
        assert isinstance(base.tokens, VisionInputs), "checked by the caller"
        assert isinstance(base.tokens.images, TowerInputs), "those of a base run"
        self.model, self.tokens, patches = base.model, base.tokens, base.tokens.images.patches
        changes = [change for change in shared if change.site.startswith(TOWER)]
        self.hooks = [(site, writer(site, [changes])) for site in dict.fromkeys(change.site for change in changes)]
        with self.model.hooks(fwd_hooks=self.hooks):
            stream, self.context = self.model.vision.before_blocks(patches)
        self.patches = replace(patches, vectors=patches.vectors[..., :0])  # the stream has them
        self.streams, self.layer = {0: stream}, 0
        self.n_tokens = stream.shape[0] * stream.shape[1]
        self.costs = [self.n_tokens * token_cost(block).total for block in self.model.vision.blocks]
        layers = self.model.tree.feature_layers
        self.read = {len(self.costs)} if layers is None else set(layers)  # the streams that the projector reads

    def first_block(self, cell: Cell) -> int:
        """The first block that a cell changes, -1 for what is before the blocks; at most the number of those that are read."""
        return min(self._first_block(change.site) for change in cell if is_before_blocks(self.model, change.site))

    def _first_block(self, site: str) -> int:
        parts = site.split(".")
        if not site.startswith(TOWER) or parts[1] in AFTER_BLOCKS:
            return max(self.read)
        return min(int(parts[2]), max(self.read)) if parts[1] == "blocks" else -1

    def rows(self, start: int, n_cells: int) -> Rows:
        """The prompts of so many cells, which start at a block; the next ones may not start before it."""
        if start < 0:
            return repeated_rows(self.tokens, n_cells)
        with self.model.hooks(fwd_hooks=self.hooks):
            while self.layer < start:
                stream = self.streams[self.layer]
                if self.layer not in self.read:
                    del self.streams[self.layer]
                self.layer += 1
                self.streams[self.layer] = self.model.vision.blocks[self.layer - 1](stream, self.context)
        streams = {layer: repeated(stream, n_cells) for layer, stream in self.streams.items()}
        images = TowerInputs(self.patches.repeated(n_cells), streams)
        return replace(repeated_rows(replace(self.tokens, images={}), n_cells), images=images)


def resume_at_blocks(
    base: BaseRun, shared: Cell, cells: Sequence[Cell], budget: Budget, cost: Cost
) -> Iterator[tuple[list[int], list[list[Change]]]]:
    """Yields the numbers of some cells, and what their changes before the blocks make of the stream that enters the blocks, with
    the later changes. `shared` are the changes of the base run."""
    model, tower, n_tokens = base.model, None, base.n_prompts * base.n_pos
    if isinstance(base.tokens, VisionInputs) and base.tokens.images:
        tower = BaseTower(base, shared)
        n_tokens = max(n_tokens, tower.n_tokens)
    starts: dict[int, list[int]] = {}
    for number, cell in enumerate(cells):
        starts.setdefault(-1 if tower is None else tower.first_block(cell), []).append(number)
    n_cells = budget.cells_of_whole_forwards(model, torch.Size([1, n_tokens, 1]))
    for start, numbers in sorted(starts.items()):
        for part in passes(model, [cells[number] for number in numbers], n_cells):
            chosen = [numbers[i] for i in part]
            rows = repeated_rows(base.tokens, len(chosen)) if tower is None else tower.rows(start, len(chosen))
            cost.flops += 0 if tower is None else len(chosen) * sum(tower.costs[max(start, 0) : max(tower.read)])
            yield chosen, _resumed(base, shared, [cells[number] for number in chosen], rows)


def _resumed(base: BaseRun, shared: Cell, cells: Sequence[Cell], rows: Rows) -> list[list[Change]]:
    """Cells whose changes before the blocks are made in one run of these rows."""
    model = base.model
    before_blocks = [[change for change in (*shared, *cell) if is_before_blocks(model, change.site)] for cell in cells]
    sites = dict.fromkeys(change.site for cell in before_blocks for change in cell)
    with model.hooks(fwd_hooks=[(site, writer(site, before_blocks)) for site in sites]):
        stream, _, context = model.embedded(rows)
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
