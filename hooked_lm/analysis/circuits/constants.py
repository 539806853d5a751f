"""Constants in place of what edges outside of a circuit carry: a vector for each writer, the same for all prompts and positions.

Means are of the corrupted prompts; "mean" in MIB's circuit track (Mueller et al. 2025, arXiv:2504.13151) is of clean texts.
Optimal ones are learnt (Li and Janson 2024, "Optimal ablation for interpretability", arXiv:2409.09951): they lack what a writer
knows of the prompt, while other replacements also put something wrong in its place.
"""

import torch
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import check_grad_mode
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.run import Constants, Gates, Runner
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, prompts_of
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar

AT_ONCE = 4  # random circuits in a step


def mean_constants(
    model: Decoder, corrupted: Prompts | Pairs, clean: Prompts | None = None, *, max_memory: int | str = "auto"
) -> Constants:
    """The mean of what each writer writes on the corrupted prompts, over prompts and positions: vectors [node, d_model] by site.

    Use them with `Runner.ablating`. Raises as `Runner`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = mean_constants(model, "Mary and John left, Mary", "Mary and John left, John")
    >>> list(found["blocks.0.attn.hook_result"].shape)
    [8, 128]
    """
    corrupted, clean = prompts_of(corrupted, clean)
    runner = Runner(model, corrupted, clean, max_memory=max_memory)
    return {site: value.mean((1, 2)) for site, value in runner.ablated.items()}


@keeps_torch_state
def optimal_constants(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    circuit: Circuit | None = None,
    steps: int = 100,
    learning_rate: float = 0.003,
    max_memory: int | str = "auto",
    seed: int = 0,
    progress: bool | None = None,
) -> Constants:
    """The constants with which circuits are least wrong: vectors [node, d_model] by site, learnt by gradient descent.

    They begin as means, and are trained (Adam) to minimise the mean of KL(model || circuit) at the last position of the clean
    prompts. Of few prompts they learn the answers themselves: judge circuits on others, and compare their KL with that of means.

    Args:
        corrupted, clean: as for `Runner`. The corrupted prompts give the means.
        circuit: the circuit around which they are learnt; None: random ones, a few in each step, of all sizes from none to all
            edges. Constants of one circuit do not compare circuits: each has another model without edges then.
        seed: seed of the random circuits.
        max_memory, progress: as for `patching.sweep`.

    Use them with `Runner.ablating`, on other prompts than these. Raises ValueError for less than one step, a circuit of another
    model, and a loss that is not finite; otherwise as `Runner`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompts = "Mary and John left, Mary", "Mary and John left, John"
    >>> runner = Runner(model, *prompts)
    >>> mean, best = (
    ...     mean_constants(model, *prompts),
    ...     optimal_constants(model, *prompts, steps=20),
    ... )
    >>> bool(runner.ablating(best).empty() < runner.ablating(mean).empty())
    True
    """
    if steps < 1:
        raise ValueError(f"there must be one step at least, got {steps}")
    check_grad_mode("training constants")
    corrupted, clean = prompts_of(corrupted, clean)
    runner = Runner(model, corrupted, clean, max_memory=max_memory)
    if circuit is not None:
        circuit.check(runner.graph)
    constants = {site: value.mean((1, 2)).float().requires_grad_() for site, value in runner.ablated.items()}
    optimizer = torch.optim.Adam(list(constants.values()), lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    with progress_bar("constants", steps, progress) as bar, torch.enable_grad():
        for _ in range(steps):
            gates = _random_gates(runner, generator) if circuit is None else circuit.edges[None].float()
            loss = runner.ablating(constants).with_graph(gates).mean()
            if not bool(loss.isfinite()):
                raise ValueError(
                    f"KL(model || circuit) is {float(loss)}: no constants were learnt; give a smaller learning_rate"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update()
    return {site: constant.detach() for site, constant in constants.items()}


def _random_gates(runner: Runner, generator: torch.Generator) -> Gates:
    """The gates of random circuits, each with another share of the edges; the first has none."""
    shares = torch.rand(AT_ONCE, generator=generator)
    shares[0] = 0
    drawn: Tensor = torch.rand(AT_ONCE, *runner.graph.is_edge.shape, generator=generator)
    return (drawn < shares[:, None, None]).float()
