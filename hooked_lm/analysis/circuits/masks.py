"""Differentiable masks: a gate for each edge, trained by gradient descent to keep few edges and preserve the metric
(edge pruning, Bhaskar et al. 2024, arXiv:2406.16778), with hard-concrete gates, which reach exactly 0 and 1 (Louizos et al.
2018, arXiv:1712.01312)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.analysis.attribution.gradients import Metric, check_grad_mode
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.analysis.circuits.prune import check_size
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.analysis.circuits.top import largest
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.renamed import renamed
from hooked_lm.results.scores import provenance

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # Louizos et al.: gates are stretched to (LOW, HIGH), and clamped to [0, 1]
START = 2.0  # log alpha: nearly all gates are open


@dataclass(frozen=True)
class HardConcrete:
    """Random gates in [0, 1] with parameters `log_alpha`; they are exactly 0 or 1 with positive probability."""

    log_alpha: Float[Tensor, " edge"]

    def sample(self, uniform: Float[Tensor, " edge"]) -> Float[Tensor, " edge"]:
        """The gates sampled from these uniform random numbers in (0, 1)."""
        noise = uniform.log() - (-uniform).log1p()
        return (((self.log_alpha + noise) / TEMPERATURE).sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)

    def n_open(self) -> Float[Tensor, ""]:
        """The expected number of non-zero gates."""
        return (self.log_alpha - TEMPERATURE * math.log(-LOW / HIGH)).sigmoid().sum()

    def without_noise(self) -> Float[Tensor, " edge"]:
        """The gates without noise."""
        return (self.log_alpha.sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
def train_masks(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    n_edges: int,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    steps: int = 300,
    learning_rate: float = 0.1,
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    seed: int = 0,
    progress: bool | None = None,
) -> Circuit:
    """Train a gate for each edge, and keep the edges with the largest gates.

    The loss is the absolute difference between the metrics of circuit and full model, divided by that between empty circuit
    and full model, plus a Lagrangian penalty on the difference between the expected number of open gates and a target. The
    target decreases from all edges to `n_edges` in the first two thirds of the steps.

    Args:
        n_edges: the maximum number of edges; the kept edges are on paths from input to logits.
        seed: seed of the gates' noise, which does not use the global generators.

    Returns a Circuit whose scores are sigmoid(log_alpha) of the gates. See `Runner` for the other arguments.
    Raises ValueError for numbers out of range, for a metric that is the same in the full model and the empty circuit, and for a
    loss that is not finite. An interrupt raises KeyboardInterrupt, without a result.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = train_masks(
    ...     model,
    ...     "Mary and John left, Mary",
    ...     "Mary and John left, John",
    ...     n_edges=200,
    ...     steps=2,
    ... )
    >>> 0 < circuit.n_edges <= 200
    True
    """
    check_size(n_edges)
    if steps < 1:
        raise ValueError(f"there must be one step at least, got {steps}")
    check_grad_mode("training masks")
    runner = Runner(model, corrupted, clean, metric, replace_with, max_memory, answers)
    runner.warn_if_close(runner.empty())
    with progress_bar("masks", steps, progress) as bar:
        training = Training(runner, n_edges, steps, learning_rate, seed)
        for _ in range(steps):
            training.step()
            bar.update()
    scores = torch.full(runner.graph.is_edge.shape, torch.nan)
    scores[runner.graph.is_edge] = training.log_alpha.detach().sigmoid()
    settings = {"n_edges": n_edges, "steps": steps, "learning_rate": learning_rate, "metric": runner.metric_name}
    about = provenance(model, method="masks", replace_with=replace_with, seed=seed, **settings)
    return Circuit(runner.graph, largest(runner.graph, scores, n_edges), scores, about={**about, SEEN: runner.prompts})


class Training:
    """The state of the training: gates, multipliers and optimizer."""

    def __init__(self, runner: Runner, n_edges: int, steps: int, learning_rate: float, seed: int) -> None:
        self.runner, self.n_edges, self.fall = runner, n_edges, max(1, steps * 2 // 3)
        self.span = float((runner.full - runner.empty()).abs().mean())
        if not self.span > 1e-6:
            raise ValueError("the metric does not tell the full model from one without edges: there is nothing to keep")
        self.generator = torch.Generator().manual_seed(seed)
        self.log_alpha = nn.Parameter(torch.full((runner.n_edges,), START))
        self.multipliers = nn.Parameter(torch.zeros(2))
        groups: list[dict[str, Any]] = [{"params": [self.log_alpha]}, {"params": [self.multipliers], "maximize": True}]
        self.optimizer = torch.optim.Adam(groups, lr=learning_rate)
        self.n_steps = 0

    def step(self) -> None:
        """Take one step; raises ValueError if the loss or a gate is not finite."""
        with torch.enable_grad():
            gates = HardConcrete(self.log_alpha)
            uniform = torch.rand(len(self.log_alpha), generator=self.generator).clamp(1e-6, 1 - 1e-6)
            loss = self._unfaithful(gates.sample(uniform)) + self._missed(gates)
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.n_steps += 1
        if not bool(loss.isfinite()) or not bool(self.log_alpha.isfinite().all()):
            raise ValueError(f"the masks' loss is {loss.item()} at step {self.n_steps}: nothing was learnt")

    def _unfaithful(self, sampled: Float[Tensor, " edge"]) -> Float[Tensor, ""]:
        """The absolute difference of the metric from the full model's, divided by that of the empty circuit."""
        gates = torch.zeros(self.runner.graph.is_edge.shape).masked_scatter(self.runner.graph.is_edge, sampled)
        scores = self.runner.with_graph(gates[None])[0]
        return (scores.cpu() - self.runner.full).abs().mean() / self.span

    def _missed(self, gates: HardConcrete) -> Float[Tensor, ""]:
        """The penalty for the relative deviation of the expected number of open gates from the target."""
        progress = min(1.0, self.n_steps / self.fall)
        target = self.runner.n_edges ** (1 - progress) * max(1, self.n_edges) ** progress
        missed = gates.n_open() / target - 1
        return self.multipliers[0] * missed + self.multipliers[1] * missed**2
