"""Training data of dictionaries: the vectors at a site, in a seeded order that can be resumed."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.engine.cells_before_blocks import is_of_images
from hooked_lm.engine.fingerprint import Digest, modes, tokenizer_digest
from hooked_lm.engine.prompts import rows_of, some_rows
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.hook import flat
from hooked_lm.models.base import BaseModel
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.notebook_repr import NotebookRepr
from hooked_lm.results.scores import provenance

FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")  # endings of their names
Pair = tuple[Float[Tensor, "row *layer d_in"], Float[Tensor, "row *layer d_out"]]
Sites = Site | list[Site]  # one, or a list of one for each layer
Prompts = Sequence[str] | Tensor | VisionInputs
Read = tuple[
    Tensor | VisionInputs, Bool[Tensor, "batch pos"] | None
]  # what a model reads, of any kind, and real tokens


@runtime_checkable
class Stream(Protocol):
    """A source of training vectors: inputs and target outputs (the same for an autoencoder).

    They are [row, width], or [row, layer, width] for transcoders of several layers.
    """

    def fill(self, number: int) -> Pair:
        """The vectors of buffer `number`; deterministic."""

    def about(self) -> dict[str, Any]:
        """Metadata of the vectors: a training resumes only from one of the same. "sha256" is a hash of what determines them."""


@dataclass(repr=False)
class ActivationBatches(NotebookRepr):
    """Vectors in memory: inputs [row, d_in], and outputs [row, d_out] of a transcoder; of several layers [row, layer, width]."""

    inputs: Tensor
    outputs: Tensor | None = None

    def fill(self, number: int) -> Pair:
        return self.inputs, self.inputs if self.outputs is None else self.outputs

    def about(self) -> dict[str, Any]:
        return provenance(None, rows=len(self.inputs), sha256=Digest().of((self.inputs, self.outputs)).hex())

    def __repr__(self) -> str:
        outputs = "" if self.outputs is None else f", outputs {[*self.outputs.shape]}"
        return f"ActivationBatches(inputs {[*self.inputs.shape]}{outputs})"


def _not_a_path(text: str) -> str:
    """A text. Raises ValueError for the name of a file."""
    if os.path.exists(text) or (text.endswith(FILES) and not any(c.isspace() for c in text)):
        raise ValueError(
            f"prompts={text!r} is the name of a file, not a text: give the texts in a list, or "
            "`harvest(model, path, sites, directory)` and train on the `stream` of its store"
        )
    return text


class Activations:
    """The activations of a model at one site, or at two, or at two for each of several layers, without gradients and padding.

    Each buffer is filled with the vectors of `buffer_prompts` prompts, in an order that is reshuffled in each epoch;
    `batch_size` of them run together.

    Args:
        prompts: texts (truncated to the model's n_ctx), token ids [prompt, pos], `VisionInputs` for a vision-language model, or,
            for a model without a tokenizer, its stacked inputs.
        site, site_out: one site each, by name or short name; `site_out` is the output site of a transcoder. For transcoders of
            several layers a list of both: the vectors are then stacked, [row, layer, width].
        skip: how many positions at the start of each prompt are excluded, such as a BOS, whose activations are atypical.

    Raises ValueError for no prompts, for the name of a file in their place, for a name that matches several sites, and for a site
    of a vision tower in a model that reads text too: a dictionary there is trained on the tower alone.
    """

    def __init__(
        self,
        model: HookedRootModule,
        prompts: Prompts,
        site: Sites,
        site_out: Sites | None = None,
        *,
        buffer_prompts: int = 256,
        batch_size: int = 32,
        skip: int = 0,
        seed: int = 0,
    ) -> None:
        if isinstance(prompts, str):
            prompts = [_not_a_path(prompts)]
        prompts = as_rows(model, prompts)
        if not len(prompts):
            raise ValueError("prompts is empty: give at least one")
        for name, number, least in (
            ("buffer_prompts", buffer_prompts, 1),
            ("batch_size", batch_size, 1),
            ("skip", skip, 0),
        ):
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if skip and isinstance(prompts, Tensor) and (prompts.is_floating_point() or not hasattr(model, "tokens")):
            raise ValueError("positions can be skipped in texts and token ids only: give skip=0")
        mask = prompts.attention_mask if isinstance(prompts, VisionInputs) else None
        if skip and mask is not None and not bool(mask[:, 0].all()):
            raise ValueError(
                "positions are skipped from the left, where these prompts are padded: give padding_side='right'"
            )
        self.model, self.prompts, self.seed = model, prompts, seed
        self.of_layers = isinstance(site, list)
        self.sites = [one_site(model, of) for of in both_sites(site, site_out)]
        if of_images := [name for name in self.sites if is_of_images(model, name)]:
            raise ValueError(
                f"'{of_images[0]}' has values of images: train its dictionary on a HookedVisionEncoder, with pixels [image, "
                "channel, height, width] as prompts; HookedVisionEncoder.from_pretrained loads the tower of a checkpoint alone"
            )
        self.buffer_prompts, self.batch_size, self.skip = min(buffer_prompts, len(prompts)), batch_size, skip

    def batches(self, number: int) -> list[list[int]]:
        """The prompts of buffer `number`, of which each list runs together."""
        start, n = number * self.buffer_prompts, len(self.prompts)
        chosen = [self._order(i // n)[i % n] for i in range(start, start + self.buffer_prompts)]
        return [chosen[i : i + self.batch_size] for i in range(0, len(chosen), self.batch_size)]

    def fill(self, number: int) -> Pair:
        parts = [self.vectors(rows) for rows in self.batches(number)]
        read = torch.cat([part[0] for part in parts])
        return read, read if len(self.sites) == 1 else torch.cat([part[1] for part in parts])

    def about(self) -> dict[str, Any]:
        counts = {"prompts": len(self.prompts), "buffer_prompts": self.buffer_prompts}
        tokenizer = getattr(self.model, "tokenizer", None)
        read_by = None if tokenizer is None else tokenizer_digest(tokenizer)
        whole = Digest().of((self.model, self.prompts, read_by, modes())).hex()
        return provenance(self.model, sites=self.sites, **counts, skip=self.skip, seed=self.seed, sha256=whole)

    def _order(self, epoch: int) -> list[int]:
        """The order of the prompts in an epoch."""
        if getattr(self, "_known", (-1, []))[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._known = (epoch, torch.randperm(len(self.prompts), generator=generator).tolist())
        return self._known[1]

    @torch.no_grad()
    def vectors(self, rows: Sequence[int]) -> Pair:
        """The vectors at the sites for these prompts, [row, width] or [row, layer, width]: one row for each position."""
        inputs, mask = self.inputs(rows)
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask.long()}
        if isinstance(self.model, BaseModel):  # then no more is computed than the sites need
            options["return_type"] = None
        _, cache = self.model.run_with_cache(inputs, names_filter=self.sites, **options)
        found = []
        for site in self.sites:
            value = side_by_side(self.model, site, cache[site])
            kept = value.flatten(0, -2) if mask is None else value[:, self.skip :][mask[:, self.skip :]]
            if not bool(kept.isfinite().all()):
                raise FloatingPointError(
                    f"the model has NaN or infinite values at '{site}': no dictionary can be trained"
                )
            found.append(kept.float())
        return stacked(found, self.sites, self.of_layers)

    def inputs(self, rows: Sequence[int]) -> Read:
        """The model's input for these prompts, and the mask of real tokens (None: the input has no padding)."""
        return inputs_of(self.model, self.prompts, rows)


def both_sites(site: Sites, site_out: Sites | None) -> list[Site]:
    """The sites that are read, then those that are written, if there are any; ValueError unless there is one for each layer."""
    if not isinstance(site, list) and not isinstance(site_out, list):
        return [site] if site_out is None else [site, site_out]
    if not isinstance(site, list) or not isinstance(site_out, list) or len(site) != len(site_out) or not site:
        raise ValueError(
            f"transcoders of several layers have a list of sites and one as long of site_out; got {site!r} and {site_out!r}"
        )
    return [*site, *site_out]


def stacked(found: Sequence[Float[Tensor, "row d"]], sites: Sequence[str], of_layers: bool) -> Pair:
    """The inputs and outputs from the vectors at all sites, in the order of `both_sites`.

    Raises ValueError for sites of several widths where vectors of layers are stacked.
    """
    if not of_layers:
        return found[0], found[-1]
    half, widths = len(found) // 2, [vectors.shape[1] for vectors in found]
    if len({*widths[:half]}) > 1 or len({*widths[half:]}) > 1:
        known = ", ".join(f"{site} {width}" for site, width in zip(sites, widths, strict=True))
        raise ValueError(f"transcoders of several layers read and write vectors of one width; got {known}")
    return torch.stack(list(found[:half]), 1), torch.stack(list(found[half:]), 1)


def by_layer(vectors: Float[Tensor, "row *layer d"]) -> list[Float[Tensor, "row d"]]:
    """The vectors of each layer; of one site just these."""
    return [vectors] if vectors.ndim == 2 else list(vectors.unbind(1))


def as_rows(model: HookedRootModule, prompts: Prompts) -> Prompts:
    """The prompts, with token ids if they have images."""
    return rows_of(model, prompts) if isinstance(prompts, VisionInputs) else prompts


def inputs_of(model: HookedRootModule, prompts: Prompts, rows: Sequence[int]) -> Read:
    """The model's input for some of the prompts, and the mask of real tokens (None: the input has no padding)."""
    if isinstance(prompts, VisionInputs):
        some = some_rows(model, prompts, rows).to(model.device)
        given = some.attention_mask if isinstance(some, VisionInputs) else None
        return some, (torch.ones(some.shape, device=model.device) if given is None else given).bool()
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if isinstance(prompts, Tensor):
        chosen = prompts[list(rows)].to(device)
        is_text = not prompts.is_floating_point() and prompts.ndim == 2 and hasattr(model, "tokens")
        return chosen, torch.ones_like(chosen, dtype=torch.bool) if is_text else None
    tokens, mask = model.tokens.encode([prompts[row] for row in rows], padding_side="right", truncate=True)
    return tokens.to(device), mask.bool().to(device)


def check_same_inputs(first: object, second: object) -> None:
    """Raises ValueError if two models read other tokens in the same texts."""
    pair = [each.cpu() for each in (first, second) if isinstance(each, Tensor)]
    if len(pair) == 2 and not torch.equal(*pair):
        raise ValueError("the models read other tokens in the same texts: give prompts as ids that both know")


def one_site(model: HookedRootModule, site: Site) -> str:
    """The full name of one site; ValueError if the name matches several."""
    names = model.names(site)
    if len(names) != 1:
        raise ValueError(f"{site!r} matches {len(names)} sites: give one, such as {names[0]!r}")
    return names[0]


def side_by_side(model: HookedRootModule, site: str, value: Tensor) -> Tensor:
    """A site's value with its heads flattened into the last axis."""
    dims = model.hook_dict[site].dims
    has_heads = len(dims) == 4 and dims[2].endswith("head")
    return value.flatten(-2) if has_heads else flat(None, value, f"'{site}'")


def batches(
    stream: Stream, size: int, seed: int, fill: int = 0, start: int = 0
) -> Iterator[tuple[Pair, tuple[int, int]]]:
    """Yields shuffled batches endlessly from a place (buffer, row) in the stream on, each with the place after it.

    A later buffer that is smaller than a step, as the last of an epoch may be, is joined by the next ones. Raises ValueError if
    the first one is.
    """
    while True:
        read, written = stream.fill(fill)
        if len(read) < size and fill == 0:
            raise ValueError(
                f"the buffer holds {len(read)} vectors, fewer than a step needs ({size}): give more prompts"
            )
        after = fill + 1
        while len(read) < size:
            more = stream.fill(after)
            read, written, after = torch.cat([read, more[0]]), torch.cat([written, more[1]]), after + 1
        order = torch.randperm(len(read), generator=torch.Generator().manual_seed(seed * 1_000_003 + fill))
        for at in range(start, len(read) - size + 1, size):
            rows = order[at : at + size].to(read.device)
            yield (read[rows], written[rows]), (fill, at + size)
        fill, start = after, 0
