"""The circuit track of MIB (Mueller et al. 2025, arXiv:2504.13151), in one dict of tensors: also with the original.

Of a ranking of edges it measures the circuits of a thousandth to all of them, with other edges ablated: the faithfulness of
each, the edges that are left, and the areas under and beside the curve. Graphs, attribution and evaluation are those of EAP-IG,
as CircuitKIT has them. Means are taken over texts that are cut at 512 tokens, for which it sets `cfg.n_ctx` above the model's.

`python mib_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes what `everything`
finds to the file OUT.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
HOW = [
    *(("EAP", ablation) for ablation in ("patching", "zero", "mean", "mean-positional")),
    *((method, "patching") for method in ("EAP-IG-inputs", "EAP-IG-activations", "clean-corrupted")),
]
RUNS = [(model, *how) for model in ("gpt2", "grouped", "parallel") for how in HOW]
TEXTS = [["w6 w9 w11 w7", "w8 w3 w21 w41"], ["w30 w32 w5 w6", "w14 w9 w4 w22"]]  # of which means are taken


def curve(model: Any, method: str, ablation: str) -> Tensor:
    """The faithfulness and the weighted number of edges of each circuit, [share, 2]."""
    from circuitkit.backends.eap import attribute, evaluate, graph
    from circuitkit_run import Batches, difference

    def each(*given: Any) -> Tensor:
        return difference(*given, mean=False)

    ranked = graph.Graph.from_model(model)
    means = {"intervention_dataloader": TEXTS} if ablation.startswith("mean") else {}
    how = {"intervention": ablation, **means} if method == "EAP" else {}
    attribute.attribute(model, ranked, Batches(), difference, method=method, quiet=True, **how)
    values, n_edges = [], []
    for share in (0.0, *SHARES):
        ranked.apply_topn(round(share * int(ranked.real_edge_mask.sum())), absolute=True)
        kept = evaluate.evaluate_graph(model, ranked, Batches(), each, intervention=ablation, quiet=True, **means)
        values.append(kept.mean())
        n_edges.append(ranked.weighted_edge_count())
    empty, whole = values[0], values[-1]
    return torch.stack([(torch.stack(values) - empty) / (whole - empty), torch.tensor(n_edges)], -1)[1:]


def areas(values: Tensor) -> Tensor:
    """The area under the curve of faithfulness over the share of edges (CPR), and between the curve and one (CMD)."""
    shares, faithful = torch.tensor(SHARES), values[:, 0]
    return torch.stack([torch.trapezoid(faithful, shares), torch.trapezoid((1 - faithful).abs(), shares)])


def everything() -> dict[str, Tensor]:
    from circuitkit_run import circuitkit, made

    circuitkit()
    found = {}
    for name, method, ablation in RUNS:
        values = curve(made(name), method, ablation).detach().float()
        found[f"{name}, {method}, {ablation}: curve"] = values
        found[f"{name}, {method}, {ablation}: areas"] = areas(values)
    return found


def main(folder: str, out: Path) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in everything().items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
