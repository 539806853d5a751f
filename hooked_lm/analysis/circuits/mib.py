"""Circuits as JSON of MIB's circuit track (Mueller et al. 2025, arXiv:2504.13151), which the code of EAP-IG reads and writes.

A file has `cfg`, and whether each node and edge is in the circuit, with the scores of edges. Its names are "a0.h1" for head 1 of
layer 0 and "input->a0.h1<q>" for an edge; MLPs, "input" and "logits" have the same names as here. Its scores are positive for an
edge that the answer needs, and effects of ablation are negative for those: they change their sign.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.graph import LOGITS, Graph, Node
from hooked_lm.analysis.circuits.circuit import EFFECTS, KL, Circuit
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.files import replacing, writable
from hooked_lm.models.decoder import Decoder

__all__ = ["from_mib", "to_mib"]

KNOWN = re.compile(r"input|logits|m\d+|L(\d+)H(\d+)(<[qkv]>)?")
OF_KEEPING = ("pruning", "exchange", "masks")  # searches whose scores are positive, and larger for edges that are kept


@keeps_torch_state
def to_mib(circuit: Circuit, path: str | Path, model: Decoder) -> Path:
    """Writes a circuit as JSON of MIB's circuit track; returns the path.

    The file has all edges of the model with their scores. An edge without a score has 0; of a circuit without scores, each of its
    edges has 1. Keys and values that several heads share are an edge of each head there, with an equal part of the score.

    Scores there are positive for an edge that the answer needs. So scores that are effects of ablating an edge, as those of
    `discover`, are written with the other sign; those of the searches "pruning", "exchange" and "masks" and those of KL as the
    metric, which are positive for such edges, as they are. Scores of a circuit that does not say how it was found are effects.

    An existing file is replaced, as by `save`. Raises ValueError for a circuit of another model, and for a model with nodes that
    the format does not have, such as mixers; OSError if the file cannot be written.

    >>> import tempfile
    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = Circuit.of(Graph.of(model), [("input", "L1H2<v>"), ("L1H2", "logits")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     from_mib(to_mib(circuit, f"{folder}/circuit.json", model), model)
    Circuit(2 of 1519 edges; 3 nodes; MIB)
    """
    graph, names = Graph.of(model), _Names(model)
    circuit.check(graph)
    writable(path)
    scores = circuit.edges.float() if circuit.scores is None else _needed(circuit).nan_to_num(nan=0.0)
    edges: dict[str, dict[str, Any]] = {}
    for place in graph.is_edge.nonzero().tolist():
        writer, readers = names.written[place[0]], names.read[place[1]]
        for reader in readers:
            score = float(scores[tuple(place)]) / len(readers)
            edges[f"{writer}->{reader}"] = {"score": score, "in_graph": bool(circuit.edges[tuple(place)])}
    used = set(circuit.nodes) | {LOGITS}
    nodes = {name: {"in_graph": node.name in used} for name, node in zip(names.written, graph.writers, strict=True)}
    content = {"cfg": names.cfg, "nodes": {**nodes, LOGITS: {"in_graph": True}}, "edges": edges}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    return Path(path)


@keeps_torch_state
def from_mib(path: str | Path, model: Decoder) -> Circuit:
    """The circuit in a file of MIB's circuit track, with the scores of its edges.

    Edges that the file does not list are not in the circuit, and have no score. The scores of edges to keys and values that
    several heads share are added. Scores get the sign of effects of ablating an edge, the other one than in the file: negative
    for an edge that the answer needs.

    Raises ValueError for any other file, for a circuit of another model, for neurons that are left out of a node, and for shared
    keys and values that only some heads have an edge to.
    """
    names, graph = _Names(model), Graph.of(model)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        cfg, listed, nodes = content["cfg"], content["edges"], content["nodes"]
        found = {name: (bool(edge["in_graph"]), float(edge["score"])) for name, edge in listed.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no circuit of MIB's circuit track: {error!r}") from None
    for name in ("n_layers", "n_heads"):
        if cfg.get(name) != names.cfg[name]:
            raise ValueError(
                f"{path} has a circuit of a model with {name}={cfg.get(name)}, and this one has {names.cfg[name]}"
            )
    if partial := [name for name, node in nodes.items() if not all(node.get("neurons", ()))]:
        raise ValueError(f"{path} leaves out neurons of {partial[0]!r}, and circuits here have whole nodes")
    edges, scores = torch.zeros_like(graph.is_edge), torch.full(graph.is_edge.shape, torch.nan)
    for place in graph.is_edge.nonzero().tolist():
        writer, readers = names.written[place[0]], names.read[place[1]]
        each = [found.pop(f"{writer}->{reader}", None) for reader in readers]
        known = [edge for edge in each if edge is not None]
        if len({is_in for is_in, _ in known}) > 1 or len(known) not in (0, len(each)):
            raise ValueError(
                f"{path} has an edge from {writer!r} to some of {', '.join(readers)} alone, which are one node of this model"
            )
        if known:
            edges[tuple(place)] = known[0][0]
            scores[tuple(place)] = -sum(score for _, score in known)
    if found:
        raise ValueError(f"{path} has an edge {next(iter(found))!r}, which this model does not have")
    return Circuit(graph, edges, scores, about={"method": "MIB"})


def _needed(circuit: Circuit) -> Float[Tensor, "writer reader"]:
    """Scores that are positive for edges that the answer needs."""
    assert circuit.scores is not None
    is_size = circuit.about.get("method") in OF_KEEPING and circuit.about.get("scores") != EFFECTS
    return circuit.scores if is_size or circuit.about.get("metric") == KL else -circuit.scores


class _Names:
    """The names of nodes in a file: one for each writer, and for each reader those of its heads."""

    def __init__(self, model: Decoder) -> None:
        graph = Graph.of(model)
        for node in (*graph.writers, *graph.readers):
            if not KNOWN.fullmatch(node.name):
                raise ValueError(
                    f"the format has heads, MLPs, the input and the logits, and this model has a node {node.name!r}: "
                    "save the circuit by circuit.save(path)"
                )
        heads = [node.head for node in graph.writers if node.head is not None]
        self.n_heads = max(heads, default=0) + 1
        layers = range(model.cfg.n_layers)
        self.n_keys = {n: sum(_is_key(node, n) for node in graph.readers) for n in layers}
        is_parallel = any(
            node.name == "m0" and node.rank == other.rank
            for node in graph.readers
            for other in graph.readers
            if other.name == "L0H0<q>"
        )
        self.cfg = {"n_layers": len(layers), "n_heads": self.n_heads, "parallel_attn_mlp": is_parallel}
        self.cfg |= {"d_model": model.cfg.d_model}
        self.written = [self._of(node)[0] for node in graph.writers]
        self.read = [self._of(node) for node in graph.readers]

    def _of(self, node: Node) -> list[str]:
        """The name of a node; of keys and values, those of all heads that share them."""
        if node.head is None:
            return [node.name]
        _, _, port = node.name.partition("<")
        share = self.n_heads // self.n_keys[node.layer] if port in ("k>", "v>") else 1
        heads = range(node.head * share, (node.head + 1) * share)
        return [f"a{node.layer}.h{head}{f'<{port}' if port else ''}" for head in heads]


def _is_key(node: Node, layer: int) -> bool:
    return node.layer == layer and node.name.endswith("<k>")
