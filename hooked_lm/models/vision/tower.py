"""A vision tower: pixels in, a residual stream over class tokens and patches out."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.norms.norm import add_norm, norm_of
from hooked_lm.components.vision.patch_embed import Mode, PatchEmbed
from hooked_lm.components.vision.patches import Patches, check_pixels
from hooked_lm.components.vision.tower_context import TowerContext
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.models.stack import Stack, Stream
from hooked_lm.models.vision.inputs import ImageTensors, TowerInputs


def patches_of(tree: VisionConfig, embed: PatchEmbed, images: Mapping[str, object], interpolate: bool) -> Patches:
    """The patches of images that are arguments of an encoder.

    Raises TypeError for pixels that are not ready, ValueError without images and for images that do not fit.
    """
    given = tree.pixels.ready(tree.embed, {name: x for name, x in images.items() if x is not None})
    if not given:
        raise ValueError("there are no images: give pixel_values")
    patches = tree.pixels.patches(embed, **given)
    if not interpolate:
        tree.check_sizes(patches, ", or call the model with interpolate_pos_encoding=True")
    return patches


class TowerParts(nn.Module):
    """The parts of a vision tower, which is a separate model or a part of one.

    `hook_patch_embed` are the vectors of patches, `hook_pos_embed` those of positions, class tokens included. All sites are in
    the order of the image, row by row.
    """

    stack = Stack(ln_embed="ln_pre")
    stacks: ClassVar[tuple[Stack, ...]] = (stack,)
    embed: Any
    pos_embed: Any
    blocks: Any
    pooler: Any
    projection: Any
    classifier: Any

    def make_tower(self, tree: VisionConfig) -> None:
        """Adds all parts; absent heads are None."""
        self.embed = tree.embed.build()
        self.hook_patch_embed = HookPoint("batch", "patch", "d_model")
        if tree.pos_embed is not None:
            self.pos_embed = tree.pos_embed.build()
            self.hook_pos_embed = HookPoint("batch", "pos", "d_model")
        add_norm(self, "ln_pre", tree.ln_pre)
        self.stack.build_blocks(self, tree.blocks, tree.ln_final)
        self.pooler = None if tree.pooler is None else tree.pooler.build()
        self.projection = None if tree.projection is None else tree.projection.build()
        self.classifier = None if tree.classifier is None else tree.classifier.build()
        self.merger = None if tree.merger is None else tree.merger.build()

    def before_blocks(self, patches: Patches, interpolation: Mode | None = None) -> tuple[Stream, TowerContext]:
        """The stream before the first block, and the context of the run."""
        check_pixels(patches)
        context = TowerContext(patches, self.embed.cfg.n_before)
        resid = self.embed.with_class_tokens(self.hook_patch_embed(self.embed(patches.vectors)))
        if "pos_embed" in self._modules:
            positions = self.pos_embed(patches, interpolation).to(resid.dtype)
            if is_listening(self.hook_pos_embed):
                positions = self.hook_pos_embed(positions.expand_as(resid).contiguous())
            resid = resid + positions
        return norm_of(self, "ln_pre")(resid), context

    def read(
        self,
        patches: Patches,
        layers: Sequence[int] | None = None,
        interpolation: Mode | None = None,
        pooler: nn.Module | None = None,
        start: Mapping[int, Stream] | None = None,
    ) -> tuple[Float[Tensor, "image pos width"], TowerContext]:
        """The streams after so many blocks each, side by side; by default the normalised stream after all blocks.

        Blocks, a norm and a `pooler` beyond what is read run only if something listens there. `start` are streams of another run
        after so many blocks each; the run continues from the last of them.
        """
        if patches.counts is not None and start is None and not heard(self):
            return self._read_by_size(patches, layers, interpolation)
        if start is None:
            resid, context = self.before_blocks(patches, interpolation)
            start = {0: resid}
        else:
            context = TowerContext(patches, self.embed.cfg.n_before)
        n_blocks, final = len(self.blocks), norm_of(self, self.stack.ln_final)
        pools = pooler is not None and heard(pooler)
        whole = layers is None or pools or heard(final)
        read = [*(layers or ()), *(i + 1 for i, block in enumerate(self.blocks) if heard(block))]
        stop = n_blocks if whole else max(read)
        first, kept = max(start), dict(start)
        resid = kept[first]
        for layer in range(first, stop):
            resid = self.blocks[layer](resid, context)
            if layer + 1 in (layers or ()):
                kept[layer + 1] = resid
        normalized = final(resid) if whole else resid
        if pooler is not None and pools:
            pooler(normalized, context.real)
        return normalized if layers is None else torch.cat([kept[layer] for layer in layers], -1), context

    def _read_by_size(
        self, patches: Patches, layers: Sequence[int] | None, interpolation: Mode | None
    ) -> tuple[Float[Tensor, "image pos width"], TowerContext]:
        """The streams of images of several sizes, those of one size at a time, so that padding is not run; it is zero."""
        streams: dict[int, Stream] = {}
        for rows, columns in dict.fromkeys(patches.grids):
            images, n = [i for i, grid in enumerate(patches.grids) if grid == (rows, columns)], rows * columns
            hidden = None if patches.hidden is None else patches.hidden[images, :n]
            some = Patches(patches.vectors[images, :n], ((rows, columns),) * len(images), hidden)
            streams |= zip(images, self.read(some, layers, interpolation)[0], strict=True)
        in_order = [streams[image] for image in range(len(patches.grids))]
        return pad_sequence(in_order, batch_first=True), TowerContext(patches, self.embed.cfg.n_before)


def heard(module: nn.Module) -> bool:
    """Whether anything listens within a module."""
    return is_listening(*(point for point in module.modules() if isinstance(point, HookPoint)))


class VisionTower(TowerParts):
    """The vision tower of a larger model."""

    def __init__(self, tree: VisionConfig) -> None:
        super().__init__()
        self.tree = tree
        self.make_tower(tree)

    def resolved(self, images: ImageTensors | TowerInputs) -> TowerInputs:
        """Images as the tower reads them: tensors are checked and cut into patches, what is in the tower stays as it is.

        Raises TypeError for pixels that are not ready, ValueError for images that do not fit.
        """
        if isinstance(images, TowerInputs):
            return images
        pixels = self.tree.pixels
        return TowerInputs(pixels.patches(self.embed, **pixels.ready(self.tree.embed, images)))
