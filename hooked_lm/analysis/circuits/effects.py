"""The exact effect of each edge of a circuit."""

from dataclasses import replace

from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import EFFECTS, Circuit
from hooked_lm.analysis.circuits.discover import scores_of
from hooked_lm.analysis.circuits.run import Runner, check_replacement
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.renamed import renamed


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
def exact_effects(
    model: Decoder,
    circuit: Circuit,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Circuit:
    """The same circuit, with the exact effect of each of its edges as score: the change of the metric when the edge alone is
    ablated in the full model.

    Searches such as pruning keep edges without measuring them one at a time; all that they keep has the same score. The effects
    tell these edges apart in `plot` and `to_dataframe`. Edges outside of the circuit have the score NaN.

    Args:
        metric, answers, replace_with, max_memory, progress: as for `discover`.

    Raises ValueError for an empty circuit, a circuit of another model and an unknown `replace_with`.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(" Mary", " John", model=model)
    >>> circuit = Circuit.of(
    ...     Graph.of(model), [("input", "m0"), ("m0", "logits"), ("input", "logits")]
    ... )
    >>> found = exact_effects(model, circuit, corrupted, clean, metric=answers)
    >>> sorted(found.to_dataframe()["writer"])
    ['input', 'input', 'm0']
    """
    check_replacement(replace_with)
    graph = Graph.of(model)
    circuit.check(graph)
    if not circuit.n_edges:
        raise ValueError("the circuit is empty: there is no edge to measure")
    runner = Runner(model, corrupted, clean, metric, replace_with, max_memory, answers)
    found = patch_edges(
        model,
        corrupted,
        clean,
        metric=runner.metric,
        edges=list(graph.named(circuit.edges)),
        replace_with=replace_with,
        direction="noise",
        max_memory=max_memory,
        progress=progress,
        control=None,
    )
    about = {**circuit.about, "scores": EFFECTS, "metric": runner.metric_name}
    return replace(circuit, scores=scores_of(graph, found), about=about)
