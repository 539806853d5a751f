"""`fit_jacobian_lens`: the mean Jacobian from each layer's stream to the last layer's, over prompts and positions."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.gradients import check_grad_mode
from hooked_lm.analysis.reading.corpus import Corpus, Data, TextBatch
from hooked_lm.analysis.reading.jacobian_lens import JacobianLens, weights_known
from hooked_lm.analysis.reading.jacobians import PromptJacobians
from hooked_lm.callers import warn_caller
from hooked_lm.engine.fingerprint import fingerprint
from hooked_lm.engine.prompts import AxisSelection, chosen
from hooked_lm.files import writable
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores, provenance

__all__ = ["fit_jacobian_lens"]

FORMAT = "hooked_lm.JacobianSums"
SAVE_EVERY = 30.0  # seconds
LIMIT = 3.0  # an outlier's Jacobian is more than this times as large as the median prompt's
OUTLIERS = ("winsorize", "leave out", "keep")


def fit_jacobian_lens(
    model: Decoder,
    prompts: Data,
    *,
    backward: str | BackwardRules = "plain",
    layers: AxisSelection = "each",
    site: str = "resid_post",
    skip: int = 1,
    sinks: float | None = 10.0,
    outliers: str = "winsorize",
    held_out: float = 0.1,
    seed: int = 0,
    max_memory: int | str = "auto",
    resume_file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> JacobianLens:
    """Fit a Jacobian lens: the mean derivative of the last layer's stream with respect to each layer's (Gurnee et al. 2026,
    "Verbalizable Representations Form a Global Workspace in Language Models", Transformer Circuits Thread).

    Of a prompt it is the mean over source positions of the sum over target positions, at the source or after it. The last
    position is neither, as no next token is known there. Each prompt counts once, whatever its length. With RelP's backward pass
    this is the R-lens. A prompt takes `d_model` rows of backward passes, which run together as memory allows.

    Args:
        prompts: texts, token ids [prompt, pos], conversations (`model.chat`), or `VisionInputs`.
        backward: "plain" derivatives; "relp" or "gim", the rules of these methods; or `BackwardRules`.
        layers, site: the streams that are sources.
        skip: how many first positions are left out. Published lenses leave out 16.
        sinks: positions are left out whose vector is, at some layer, more than this times as long as the median vector of the
            prompt; None: none is.
        outliers: prompts whose Jacobian less the identity is, at a layer, more than 3 times as large as the median prompt's:
            "winsorize" scales it down to that, "leave out" leaves the prompt out, "keep" does nothing.
        held_out: the fraction of prompts (at least one) on which the lens is measured and not fitted; 0: none.
        seed: seed of the choice of prompts that are held out.
        max_memory: "auto", or the bytes that a pass may take in addition to the model. The sums, on the CPU, take 16 bytes for
            each entry of the lens.
        resume_file: a file to which the sums are written every 30 seconds and at the end, or when interrupted. The same call
            resumes from it, with the same result.
        progress: whether to show a progress bar; None: if the work takes longer than two seconds.

    Warns of prompts that are too short. Raises before the first pass: ValueError for models with several streams, with two stacks
    or with attention in both directions, for parts without rules, for numbers out of range and for a file of another fit;
    RuntimeError in inference mode. Raises FloatingPointError for a Jacobian that is not finite, ValueError if no prompt is long
    enough.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = ["The capital of France is Paris.", "Mary went home because she was ill."]
    >>> lens = fit_jacobian_lens(model, texts, layers=[2, 3], held_out=0)
    >>> lens.J.shape
    torch.Size([2, 128, 128])
    >>> bool((lens.J[1] - torch.eye(128)).abs().max() < 1e-6)  # the last layer
    True
    """
    check_grad_mode("fitting a Jacobian lens")
    _check(skip, sinks, outliers, held_out)
    which = chosen(layers, model.cfg.n_layers, "layer")
    if which is None:
        raise ValueError("a lens has a Jacobian for each layer: layers must be 'each' or some, not None")
    rules = BackwardRules.of(backward)
    jacobians = PromptJacobians(model, site, which, rules, skip, sinks, max_memory)
    texts = list(Corpus(model, prompts, 1))
    own, held = _split(len(texts), held_out, seed)
    settings = {"site": site, "skip": skip, "sinks": sinks, "backward": rules.settings or "plain"}
    fit = _Fit(jacobians, [texts[i] for i in own], which, settings, resume_file)
    bar = progress_bar("Jacobian lens", len(own) + len(held), progress, unit="prompts")
    with bar:
        fit.run(bar.update)
        J, n_outliers = fit.mean(outliers)
        shares = []
        for i in held:
            shares.append(_explained(jacobians, texts[i], J))
            bar.update()
    about = provenance(model, **settings, n_layers=model.cfg.n_layers, prompts=fit.n_counted(outliers, n_outliers))
    about |= {"held_out": len(held), "seed": seed, "positions": fit.n_positions, "left_out": fit.left_out}
    about["left_out"]["outliers"] = {"prompts": n_outliers, "rule": outliers, "limit": LIMIT}
    found = torch.stack(shares, 1) if shares else torch.full((len(which), 1), torch.nan)
    score = Scores(found.float(), {"layer": which}, about=about | weights_known(model))
    first = texts[0].tokens
    probe = first[0, :8].cpu() if isinstance(first, Tensor) else None
    return JacobianLens.of(model, J.float(), tuple(which), site, score, fit.lengths.float(), probe)


def _check(skip: int, sinks: float | None, outliers: str, held_out: float) -> None:
    """Raises ValueError for numbers out of range."""
    if skip < 0:
        raise ValueError(f"skip must be at least 0, got {skip}")
    if sinks is not None and not sinks > 1:
        raise ValueError(f"sinks is a multiple of the median length of vectors, above 1, or None; got {sinks}")
    if outliers not in OUTLIERS:
        raise ValueError(f"outliers must be one of {', '.join(map(repr, OUTLIERS))}, got {outliers!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is a share of the prompts, from 0 and below 1, got {held_out}")


def _split(n: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """The prompts that the lens is fitted on, and those it is measured on, in their order."""
    if n < 1 + (held_out > 0):
        raise ValueError(
            f"a lens is fitted on some prompts and measured on others: give at least 2, or held_out=0; there are {n}"
        )
    n_held = min(n - 1, max(1, round(held_out * n))) if held_out else 0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[n_held:]), sorted(order[:n_held])


def _explained(jacobians: PromptJacobians, text: TextBatch, J: Float[Tensor, "layer d d"]) -> Float[Tensor, " layer"]:
    """The share of a prompt's Jacobian less the identity that the mean explains; NaN where it is the identity."""
    found = jacobians.of(text)
    if found is None:
        return torch.full((len(J),), torch.nan, dtype=torch.float64)
    missed = (found.J - J).flatten(1).norm(dim=1).square()
    return (1 - missed / found.sizes.square()).masked_fill(found.sizes < 1e-6, torch.nan)


@dataclass
class _Sums:
    """What is known of the prompts so far: the sum of their Jacobians, and numbers of each."""

    total: Float[Tensor, "layer d_model d_model"]
    sizes: Float[Tensor, "prompt layer"]  # NaN of a prompt without positions
    lengths: Float[Tensor, "prompt layer"]
    counts: Float[Tensor, "prompt two"]  # positions, sinks

    @property
    def n_done(self) -> int:
        return len(self.sizes)


class _Fit:
    """A fit that may be interrupted."""

    def __init__(
        self,
        jacobians: PromptJacobians,
        texts: Sequence[TextBatch],
        layers: Sequence[int],
        settings: dict[str, Any],
        resume_file: str | os.PathLike[str] | None,
    ) -> None:
        self.jacobians, self.texts = jacobians, texts
        n, d_model = len(layers), jacobians.model.cfg.d_model
        empty = torch.zeros(0, n, dtype=torch.float64)
        self.sums = _Sums(torch.zeros(n, d_model, d_model, dtype=torch.float64), empty, empty, empty.new_zeros(0, 2))
        self.file = None if resume_file is None else Path(resume_file)
        self.digest = ""
        if self.file is not None:
            writable(self.file)
            about = (list(layers), settings, "Jacobian lens")
            self.digest = fingerprint(jacobians.model, [text.tokens for text in texts], {}, [], about)
            if self.file.exists():
                self._resume(self.file)

    def _resume(self, path: Path) -> None:
        tensors, header = stored.read(path, FORMAT)
        if header["fingerprint"] != self.digest:
            raise ValueError(
                f"{path} holds another fit: its model, prompts, layers or settings differ; give another file"
            )
        self.sums = _Sums(**tensors)

    def save(self) -> None:
        """Writes the sums to the resume file, if there is one."""
        if self.file is not None:
            stored.write(self.file, FORMAT, vars(self.sums), {"fingerprint": self.digest})

    def run(self, count: Callable[[int], object]) -> None:
        """Adds up the Jacobians of the prompts that are left, and counts the prompts that are done."""
        saved, sums = time.monotonic(), self.sums
        count(sums.n_done)
        try:
            for text in self.texts[sums.n_done :]:
                self._add(text)
                count(1)
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()
        if self._known.sum() == 0:
            raise ValueError(
                f"no prompt has a position that counts: the first {self.jacobians.skip}, the last one and sinks are left out; "
                "give longer prompts, or a smaller skip"
            )
        if n_short := int((~self._known).sum()):
            warn_caller(f"{n_short} of {len(self.texts)} prompts have no position that counts, and are left out")

    def _add(self, text: TextBatch) -> None:
        """Adds one prompt; all of it, or nothing if it is interrupted."""
        sums, found = self.sums, self.jacobians.of(text)
        nothing = torch.full_like(sums.total[:, 0, 0], torch.nan)
        sizes = nothing if found is None else found.sizes
        lengths = nothing if found is None else found.lengths
        counts = torch.tensor([0, 0] if found is None else [found.n_positions, found.n_sinks], dtype=torch.float64)
        self.sums = _Sums(
            sums.total if found is None else sums.total + found.J,
            torch.cat([sums.sizes, sizes[None]]),
            torch.cat([sums.lengths, lengths[None]]),
            torch.cat([sums.counts, counts[None]]),
        )

    # ---- what was found ----------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Tensor:
        """The prompts that have positions."""
        return ~self.sums.sizes.isnan().any(1)

    @property
    def n_positions(self) -> int:
        """The number of source positions of all prompts."""
        return int(self.sums.counts[:, 0].sum())

    @property
    def left_out(self) -> dict[str, Any]:
        """What does not count, in numbers."""
        n_short = int((~self._known).sum())
        return {
            "first_positions": self.jacobians.skip,
            "last_positions": 1,
            "sinks": int(self.sums.counts[:, 1].sum()),
            "short_prompts": n_short,
        }

    @property
    def lengths(self) -> Float[Tensor, " layer"]:
        """The typical length of the vectors of each layer: the median over prompts of their medians."""
        return self.sums.lengths[self._known].median(0).values

    def n_counted(self, outliers: str, n_outliers: int) -> int:
        """The number of prompts in the mean."""
        return int(self._known.sum()) - n_outliers * (outliers == "leave out")

    def mean(self, outliers: str) -> tuple[Float[Tensor, "layer d_model d_model"], int]:
        """The mean Jacobian, and how many prompts are outliers. Theirs are computed once more, to take them out of the sum."""
        sizes, known = self.sums.sizes, self._known
        limits = LIMIT * sizes[known].quantile(0.5, dim=0)
        far = (sizes > limits) & (sizes > 1e-6)  # False of NaN
        total, n = self.sums.total.clone(), int(known.sum())
        which = far.any(1).nonzero().flatten().tolist() if outliers != "keep" else []
        for prompt in which:
            found = self.jacobians.of(self.texts[prompt])
            assert found is not None, "it was counted"
            if outliers == "leave out":
                total -= found.J
                n -= 1
                continue
            too_much = torch.where(far[prompt], 1 - limits / sizes[prompt], 0.0)[:, None, None]
            total -= too_much * (found.J - torch.eye(found.J.shape[-1], dtype=found.J.dtype))
        return total / n, len(which)
