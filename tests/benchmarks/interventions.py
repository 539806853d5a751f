"""What watching costs: ten detectors on ten sites of a random GPT-2-small-sized model, in time and in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.base import Detector
from hooked_lm.interventions.detectors import NanGuard, Record
from hooked_lm.interventions.statistics import Statistics
from hooked_lm.interventions.streaming import Streaming
from hooked_lm.interventions.top_examples import TopExamples
from tests.benchmarks.running import models
from tests.benchmarks.timing import Figure, compare
from tests.interventions.held import held_bytes

SEEN = 100
SITES = [f"blocks.{i}.hook_resid_post" for i in range(10)]


class Watcher(Detector):
    """Looks, and does nothing: the price of being called with a copy."""

    def see(self, value: Any, hook: HookPoint) -> None:
        pass


@torch.no_grad()
def time_figures() -> list[Figure]:
    """Ten of each kind on ten sites, and two of each kind but one together, against the plain forward.

    Every call sees other tokens. TopExamples is timed on its first batches, where its lists fill, and after `SEEN` batches.
    """
    ours, _, _ = models()
    batch, pos, pairs = 4, 128, 15
    draw = torch.Generator().manual_seed(0)
    tokens = torch.empty(0)

    def run(hooks: Sequence[Any], stop_at_layer: int | None = None) -> None:
        nonlocal tokens
        tokens = torch.randint(0, 50257, (batch, pos), generator=draw)
        for hook in hooks:
            if isinstance(hook, Record):
                hook.clear()
            elif isinstance(hook, TopExamples):
                hook.batch(tokens)
        ours.run_with_hooks(tokens, fwd_hooks=hooks, stop_at_layer=stop_at_layer)

    def figure(what: str, hooks: Sequence[Any]) -> Figure:
        return compare(f"{what}, {batch}x{pos}", partial(run, hooks), "our forward", lambda: ours(tokens), 1.03, pairs)

    def seen(hooks: Sequence[Any]) -> Sequence[Any]:
        for _ in range(SEEN):
            run(hooks, stop_at_layer=10)
        return hooks

    kinds = {
        "Detector": lambda site: Watcher(site),
        "Record": lambda site: Record(site),
        "NanGuard": lambda site: NanGuard(site),
        "Statistics": lambda site: Statistics(site),
        "TopExamples": lambda site: TopExamples(site),
    }
    figures = [figure(f"ten {name} on ten sites", [make(site) for site in SITES]) for name, make in kinds.items()]
    figures.append(figure(f"ten TopExamples after {SEEN} batches", seen([TopExamples(site) for site in SITES])))
    mixed = [make(site) for make, site in zip([*kinds.values()] * 2, SITES, strict=True)]
    return [*figures, figure("two of each on ten sites", mixed)]


@torch.no_grad()
def memory_figures() -> list[Figure]:
    """What ten detectors hold after a few batches, and what one needs for a moment while it looks at a large batch."""
    ours, draw, figures = models()[0], torch.Generator().manual_seed(0), []
    makes: dict[str, tuple[Callable[..., Streaming[Any]], dict[str, Any]]] = {
        "Statistics": (Statistics, {}),
        "Statistics with covariance and histogram": (Statistics, {"covariance": True, "edges": [-1.0, 0.0, 1.0]}),
        "TopExamples": (TopExamples, {}),
        "TopExamples with activations": (TopExamples, {"activations": True}),
    }
    for what, (make, settings) in makes.items():
        hooks = [make(site, **settings) for site in SITES]
        for n_rows in (1, 4, 8, 2):
            tokens = torch.randint(0, 50257, (n_rows, 32), generator=draw)
            for hook in hooks:
                hook.batch(tokens)
            ours.run_with_hooks(tokens, fwd_hooks=hooks, stop_at_layer=10)
        declared = sum(hook.n_bytes + hook.inputs.n_bytes for hook in hooks)
        figures.append(_memory(f"held by ten {what}", held_bytes(hooks), "n_bytes + inputs.n_bytes", declared))
    value, point, mib = torch.randn(32, 512, 768, generator=draw), HookPoint("batch", "pos", "d_model"), 2**20
    for at_peak in (Statistics("x"), TopExamples("x")):
        at_peak.batch(torch.randint(0, 50257, (32, 512), generator=draw))
        used = peak_bytes(partial(at_peak.see, value, point))
        times, more = (3, 16) if isinstance(at_peak, TopExamples) else (1, 8)
        what = f"{type(at_peak).__name__} at its peak, in a batch of {value.nbytes // mib} MiB"
        figures.append(_memory(what, used, f"{times} n_bytes + {more} MiB", times * at_peak.n_bytes + more * mib))
    return figures


def _memory(what: str, used: int, against: str, declared: int) -> Figure:
    return Figure(what, against, used / declared, 1.0, f"{used / 1e6:.3f} / {declared / 1e6:.3f} MB")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was allocated and not yet freed at any time of a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def detector_figures() -> list[Figure]:
    """Time and memory."""
    return [*time_figures(), *memory_figures()]
