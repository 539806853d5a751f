"""What CircuitKIT does with a model, in one dict of tensors: called here, and by itself with the original.

Its package refuses any TransformerLens but 3.8, whose source lines it rewrites for architectures that 3.8 lacks; that step alone
is left out. The experiment of automatic circuit discovery that it carries lacks two names of its own, which are given it.

`python circuitkit_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes what
`everything` finds to OUT.
"""

import importlib
import json
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"d_mlp": 32, "act_fn": "gelu_new", "normalization_type": "LN"},
    "parallel": {"d_mlp": 32, "act_fn": "gelu", "normalization_type": "LN", "parallel_attn_mlp": True,
                 "positional_embedding_type": "rotary"},
    "grouped": {"d_mlp": 32, "act_fn": "silu", "normalization_type": "RMS", "n_key_value_heads": 2, "eps": 1e-5,
                "positional_embedding_type": "rotary"},
}  # fmt: skip
EDGES = [
    "EAP",
    "EAP-IG-inputs",
    "clean-corrupted",
    "EAP-IG-activations",
    "information-flow-routes",
]  # its "exact" calls itself wrongly
NODES = ["EAP", "EAP-IG-inputs", "EAP-IG-activations", "clean-corrupted", "atp-gd", "eap-gp", "relp", "peap", "ifr"]
CLEAN = ["w5 w9 w12 w7", "w8 w3 w20 w41", "w30 w31 w5 w6", "w14 w9 w9 w22"]
CORRUPTED = ["w6 w9 w13 w7", "w8 w4 w20 w40", "w33 w31 w4 w6", "w15 w8 w9 w22"]
LABELS = torch.tensor([[7, 8], [9, 10], [11, 12], [13, 14]])


def circuitkit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its architectures are missing
        import circuitkit as found

        patches = types.ModuleType("circuitkit.backends._tl_compat")
        patches.apply_patches = lambda: None
        sys.modules.setdefault(patches.__name__, patches)
        importlib.import_module("circuitkit.backends.eap.attribute_node")
    return found


def made(name: str) -> Any:
    from circuit_tracer_run import SIZES, filled, tokenizer
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    fields = {**SIZES, "n_layers": 2, "d_model": 16, "d_head": 4, **MODELS[name]}
    model = HookedTransformer(HookedTransformerConfig.from_dict(fields), tokenizer=tokenizer())
    filled(model)
    model.cfg.use_attn_result = True
    model.cfg.use_split_qkv_input = True
    model.cfg.use_hook_mlp_in = True
    model.cfg.ungroup_grouped_query_attention = True
    return model.eval()


class Batches(list[Any]):
    """A loader of pairs, in batches of two."""

    pair_padding_side = "right"

    def __init__(self) -> None:
        super().__init__((CLEAN[i : i + 2], CORRUPTED[i : i + 2], LABELS[i : i + 2]) for i in (0, 2))


def difference(logits: Tensor, clean_logits: Tensor, lengths: Tensor, labels: Tensor, mean: bool = True) -> Tensor:
    last = logits[torch.arange(len(logits)), lengths - 1]
    found = last.gather(-1, labels.to(last.device))
    found = found[:, 1] - found[:, 0]
    return found.mean() if mean else found


def edges(model: Any) -> dict[str, Tensor]:
    from circuitkit.backends.eap import attribute, evaluate, graph

    found: dict[str, Tensor] = {}
    for method in EDGES:
        for aggregation in ("sum", "mean") if method == "EAP" else ("sum",):
            made_of = graph.Graph.from_model(model)
            attribute.attribute(
                model, made_of, Batches(), difference, method=method, aggregation=aggregation, quiet=True
            )
            found[f"edges {method} {aggregation}"] = made_of.scores
        for n in (20, 60):
            made_of.apply_topn(n)
            found[f"{method}: {n} edges"] = made_of.in_graph.float()
            for how in ("patching", "zero"):
                loader = Batches()
                metric = lambda *given: difference(*given, mean=False)  # noqa: E731
                scores = evaluate.evaluate_graph(model, made_of, loader, metric, intervention=how, quiet=True)
                found[f"{method}: circuit of {n}, {how}"] = scores
    return found


def nodes(model: Any) -> dict[str, Tensor]:
    from circuitkit.backends.eap import attribute_node, graph

    found: dict[str, Tensor] = {}
    for method in NODES:
        for neuron in (False, True) if method in ("EAP", "EAP-IG-inputs") else (False,):
            made_of = graph.Graph.from_model(model, node_scores=True, neuron_level=neuron)
            attribute_node.attribute_node(
                model, made_of, Batches(), difference, method=method, neuron=neuron, quiet=True
            )
            found[f"nodes {method} {neuron}"] = made_of.neurons_scores if neuron else made_of.nodes_scores
    return found


class GlobalCache:
    """Values of two runs by site: the corrupted one, and the one that is under way."""

    def __init__(self, device: Any) -> None:
        self.online_cache: dict[str, Tensor] = OrderedDict()
        self.corrupted_cache: dict[str, Tensor] = OrderedDict()

    def to(self, device: str, which_caches: str = "all") -> "GlobalCache":
        return self


def experiment(model: Any, **options: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Every step of TLACDCExperiment: the metric and the number of edges after each, and the edges that are left."""
    module: Any = importlib.import_module("circuitkit.data.task_data.core.TLACDCExperiment")
    module.GlobalCache, module.show = GlobalCache, lambda *given, **named: None
    tokens = model.to_tokens(CLEAN), model.to_tokens(CORRUPTED)
    before = model(tokens[0])[:, -1].log_softmax(-1).detach()

    def metric(logits: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(logits[:, -1].log_softmax(-1), before, log_target=True, reduction="batchmean")

    search = module.TLACDCExperiment(model, tokens[0], tokens[1], threshold=0.01, metric=metric, **options)
    steps = []
    with torch.no_grad():
        while search.current_node is not None:
            search.step()
            steps.append([search.cur_metric, search.count_no_edges()])
    left = [
        [name, str(index), parent, str(place)]
        for (name, index, parent, place), edge in search.corr.all_edges().items()
        if edge.present
    ]
    model.reset_hooks()
    return {"steps": torch.tensor(steps)}, left


def everything(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    circuitkit()
    model, said = made(name), {}
    found = edges(model) | nodes(model)
    if name == "gpt2":
        for how in ({}, {"zero_ablation": True}, {"use_pos_embed": True}):
            values, said[f"left {how}"] = experiment(made(name), **how)
            found[f"experiment {how}"] = values["steps"]
    return {key: value.detach().clone().float().contiguous() for key, value in found.items()}, said


def main(folder: str, out: Path) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    from safetensors.torch import save_file

    for name in MODELS:
        values, said = everything(name)
        save_file(values, out / f"{name}.safetensors", {"said": json.dumps(said)})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
