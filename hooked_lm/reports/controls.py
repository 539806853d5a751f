"""What a circuit is compared with: itself on the prompts of its search, and the circuits of exchanged answers."""

from typing import Any

from hooked_lm.analysis import circuits
from hooked_lm.analysis.attribution.edges import METHODS
from hooked_lm.analysis.circuits.held_out import JUDGED, SAME, searched_pairs
from hooked_lm.models.decoder import Decoder
from hooked_lm.viz.numbers import rounded

STEPS = 5  # of estimates


def in_search(
    model: Decoder, circuit: circuits.Circuit, chosen: circuits.Evaluation, common: dict[str, Any]
) -> circuits.Evaluation | None:
    """The evaluation on the prompts of the search; None if `chosen` is on these."""
    if chosen.about[JUDGED] == SAME:
        return None
    pairs = searched_pairs(model, circuit, common["corrupted"], common["clean"], common["metric"])
    given: dict[str, Any] = {"corrupted": pairs.corrupted, "clean": pairs.clean, "metric": pairs.metric}
    return circuits.evaluate(model, {"found": circuit}, n_random=0, **{**common, **given})


def nulls_of(
    model: Decoder, n: int, method: str, limits: dict[str, Any], common: dict[str, Any]
) -> circuits.Evaluation | None:
    """The evaluation of circuits for exchanged answers, on the prompts on which the circuit is judged."""
    if not n:
        return None
    options: dict[str, Any] = {"steps": STEPS, "check": False} if method in METHODS else {}
    found = circuits.null_circuits(model, n=n, method=method, **options, **limits, **common)
    return circuits.evaluate(model, found, n_random=0, **common)


def faithfulness(evaluation: circuits.Evaluation) -> str:
    """The faithfulness of one circuit, with its interval over prompts."""
    found = evaluation.to_dataframe().iloc[0]
    interval = f" ({rounded(found['low'])} to {rounded(found['high'])})" if evaluation.n_prompts > 1 else ""
    return f"{rounded(found['faithfulness'])}{interval}"


def range_of_nulls(nulls: circuits.Evaluation) -> str:
    """The mean faithfulness of null circuits, and the range."""
    found = nulls.to_dataframe()["faithfulness"]
    return f"{rounded(found.mean())} ({rounded(found.min())} to {rounded(found.max())}), {len(found)} searches for other answers"
