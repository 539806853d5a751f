"""Feature reports in the JSON layout of a batch of SAEDashboard, which Neuronpedia imports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hooked_lm.analysis.reading.feature_report import FeatureReport
from hooked_lm.engine.prompts import kind_of
from hooked_lm.files import replacing

__all__ = ["write_dashboards"]

TOP = {"bin_min": -1.0, "bin_contains": -1.0}  # marks of the group of top activations
KINDS = {str: "a string", int: "an integer"}


def write_dashboards(
    reports: FeatureReport | Sequence[FeatureReport],
    path: str | Path,
    *,
    model_id: str,
    layer: int,
    sae_set: str,
    prompts: str = "",
    n_tokens_in_prompt: int = 0,
) -> Path:
    """Writes feature reports as one batch of SAEDashboard; returns the path.

    The layout is that of `NeuronpediaDashboardBatch` in SAEDashboard's source, which has no other description. The lists of
    aligned and correlated neurons and features, and the distribution of decoder weights over heads, are empty: a report does not
    measure them.

    Args:
        model_id, layer, sae_set: what Neuronpedia calls the model, the layer and the set of dictionaries.
        prompts, n_tokens_in_prompt: the name of the data set of the prompts, and their length.

    An existing file is replaced, as by `save`. Raises ValueError for no reports, TypeError for anything but reports and for a
    list of prompts in place of the name of their data set, and OSError if the file cannot be written.

    >>> import tempfile
    >>> write_dashboards([], "batch-0.json", model_id="demo", layer=1, sae_set="mlp")
    Traceback (most recent call last):
    ValueError: there are no reports to write: give at least one
    """
    reports = [reports] if isinstance(reports, FeatureReport) else list(reports)
    if strange := [each for each in reports if not isinstance(each, FeatureReport)]:
        raise TypeError(f"reports must be FeatureReports, as feature_report returns them; got {kind_of(strange[0])}")
    named = {"prompts": (prompts, str), "n_tokens_in_prompt": (n_tokens_in_prompt, int), "model_id": (model_id, str)}
    named |= {"layer": (layer, int), "sae_set": (sae_set, str)}
    for name, (given, kind) in named.items():
        if not isinstance(given, kind):
            hint = ": the name of their data set" if name == "prompts" else ""
            raise TypeError(f"{name} must be {KINDS[kind]}{hint}, got {kind_of(given)}")
    if not reports:
        raise ValueError("there are no reports to write: give at least one")
    shared = {"n_tokens_in_prompt": n_tokens_in_prompt, "dataset": prompts}
    content = {
        "model_id": model_id,
        "layer": layer,
        "sae_set": sae_set,
        "features": [_feature(report) | shared for report in reports],
    }
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    return Path(path)


def _feature(report: FeatureReport) -> dict[str, Any]:
    empty = ("neuron_alignment", "correlated_neurons", "correlated_features")
    kinds = {"neuron_alignment": "values", "correlated_neurons": "pearson", "correlated_features": "pearson"}
    unknown = {f"{name}_{kind}": list[float]() for name in empty for kind in ("indices", kinds[name], "l1")}
    return {
        "feature_index": report.about["feature"],
        **unknown,
        **_tokens("neg", report.tables["suppressed"]),
        **_tokens("pos", report.tables["promoted"]),
        "frac_nonzero": report.density,
        **_bars("freq", report.bins, report.counts),
        **_bars("logits", report.logit_bins, report.logit_counts),
        "n_prompts_total": report.about["prompts"],
        "decoder_weights_dist": [],
        "activations": _activations(report),
    }


def _tokens(kind: str, rows: Sequence[tuple[str, float]]) -> dict[str, Any]:
    return {f"{kind}_str": [token for token, _ in rows], f"{kind}_values": [round(value, 3) for _, value in rows]}


def _bars(kind: str, edges: Tensor, counts: Tensor) -> dict[str, list[float]]:
    """The middles of the bins of a histogram, and their counts."""
    middles = (edges[1:] + edges[:-1]) / 2 if len(counts) else counts
    numbers = {"bar_values": middles, "bar_heights": counts}
    return {f"{kind}_hist_data_{name}": [round(value, 3) for value in of.tolist()] for name, of in numbers.items()}


def _activations(report: FeatureReport) -> list[dict[str, Any]]:
    found = []
    for _, tokens, values, _ in report.examples.snippets():
        numbers = [round(value, 3) for value in values]
        found.append({**TOP, "bin_max": float(report.examples.values[0]), "tokens": tokens, "values": numbers})
    return found
