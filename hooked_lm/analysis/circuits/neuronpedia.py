"""Circuits as attribution graphs in JSON, which Neuronpedia and the viewer of circuit-tracer read.

The format has `metadata`, `qParams` (the state of the viewer), `nodes` and `links`. Its nodes are usually features at positions;
those of a circuit are heads and MLPs, for all positions together. So each node is at the last position of the prompt.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hooked_lm.analysis.attribution.graph import INPUT, LOGITS, Graph, Node
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.prompts import kind_of
from hooked_lm.files import replacing, writable
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import provenance

__all__ = ["from_neuronpedia", "to_neuronpedia"]

EMBEDDING, HEAD, MLP, LOGIT = "embedding", "attention head", "mlp", "logit"
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@keeps_torch_state
def to_neuronpedia(
    circuit: Circuit,
    path: str | Path,
    model: Decoder,
    prompt: str,
    *,
    slug: str = "circuit",
    scan: str | None = None,
) -> Path:
    """Writes a circuit as an attribution graph in JSON, for a prompt; returns the path.

    A node is "input", a head or an MLP of a path from input to logits, or the token with the largest probability after the
    prompt. A link goes from the writer of an edge to the component that reads it. Its weight is the score of the edge (1 without
    scores); edges to queries, keys and values of one head are one link with the sum of their scores, and `readers` has each.

    Args:
        slug: the name of the graph in the viewer: small letters, digits and hyphens.
        scan: the id of the model in the viewer; by default its name in the config.

    An existing file is replaced, as by `save`. Raises ValueError for an empty circuit, a circuit of another model and an
    unsuitable slug, TypeError for several prompts, and OSError if the file cannot be written. The features of a node are not part
    of the file: a viewer has no page for a head.

    >>> import tempfile
    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = Circuit.of(Graph.of(model), [("input", "L1H2<v>"), ("L1H2", "logits")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = to_neuronpedia(
    ...         circuit, f"{folder}/graph.json", model, "When Mary and John left"
    ...     )
    ...     from_neuronpedia(path, model)
    Circuit(2 of 1519 edges; 3 nodes)
    """
    if not isinstance(prompt, str):
        raise TypeError(
            f"prompt must be one text, since a graph is of one; got {kind_of(prompt)}. Write a file for each of several prompts"
        )
    check_slug(slug)
    writable(path)
    circuit.check(Graph.of(model))
    circuit = circuit.pruned()
    if not circuit.n_edges:
        raise ValueError("no edge of the circuit is on a path from input to logits: there is nothing to show")
    nodes = _nodes(circuit, model, prompt)
    content = {
        "metadata": _metadata(circuit, model, prompt, slug, scan),
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": list(nodes.values()),
        "links": _links(circuit, {name: str(node["node_id"]) for name, node in nodes.items()}),
    }
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    return Path(path)


def check_slug(slug: str) -> None:
    """Raises ValueError for a name that viewers do not take."""
    if not SLUG.fullmatch(slug):
        raise ValueError(f"slug must be small letters, digits and hyphens, such as 'indirect-objects'; got {slug!r}")


def from_neuronpedia(path: str | Path, model: Decoder) -> Circuit:
    """The circuit in a file that `to_neuronpedia` wrote, with the scores of its edges.

    Raises ValueError for any other file, such as a graph of features, and KeyError for components that the model does not have.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        names = {node["node_id"]: node["component"] for node in content["nodes"]}
        edges = [
            (names[link["source"]], reader, score)
            for link in content["links"]
            for reader, score in link["readers"].items()
        ]
        about = dict(content["metadata"]["generation_settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no circuit that `to_neuronpedia` wrote: {error!r}") from None
    graph = Graph.of(model)
    circuit = Circuit.of(graph, [(writer, reader) for writer, reader, _ in edges], **about)
    if all(score is None for _, _, score in edges):
        return circuit
    scores = torch.full(graph.is_edge.shape, torch.nan)
    for writer, reader, score in edges:
        scores[graph.edge(writer, reader)] = torch.nan if score is None else score
    return Circuit(graph, circuit.edges, scores, about=about)


def _metadata(circuit: Circuit, model: Decoder, prompt: str, slug: str, scan: str | None) -> dict[str, Any]:
    made = provenance(model)
    return {
        "slug": slug,
        "scan": scan or made["model"],
        "transcoder_list": [],
        "prompt_tokens": list(map(str, model.to_str_tokens(prompt))),
        "prompt": prompt,
        "schema_version": 1,
        "info": {
            "description": "A circuit of heads and MLPs. Nodes stand for all positions, and are placed at the last.",
            "generator": {"name": "hooked_lm", "version": made["hooked_lm"]},
        },
        "generation_settings": dict(circuit.about),
    }


def _nodes(circuit: Circuit, model: Decoder, prompt: str) -> dict[str, dict[str, Any]]:
    """The nodes of the file by the names of components."""
    tokens = model.to_tokens(prompt)
    last = tokens.shape[1] - 1
    written = {node.name: node for node in circuit.graph.writers}
    found = {name: _node(written[name], int(tokens[0, -1]), last) for name in circuit.nodes if name != LOGITS}
    with torch.no_grad():
        probabilities = model(tokens)[0, -1].float().softmax(-1)
    best = int(probabilities.argmax())
    layer = str(len(model.blocks) + 1)
    says = f'Output "{model.to_single_str_token(best)}" (p={float(probabilities[best]):.3f})'
    found[LOGITS] = _entry(LOGITS, f"{layer}_{best}_{last}", f"L_{best}-{last}", layer, best, last, LOGIT, says) | {
        "token_prob": float(probabilities[best]),
        "is_target_logit": True,
    }
    return found


def _node(node: Node, token: int, last: int) -> dict[str, Any]:
    if node.name == INPUT:
        return _entry(INPUT, f"E_{token}_{last}", f"E_{token}-{last}", "E", last, last, EMBEDDING, "embeddings")
    layer = str(node.layer)
    # what is no head gets numbers above those of heads: MLPs, mixers, whole attention, images
    feature = node.head if node.head is not None else 100_000 + "msad".index(node.name[0])
    kind = HEAD if node.head is not None else MLP if node.name[0] == "m" else node.site.rpartition("hook_")[2]
    return _entry(
        node.name, f"{layer}_{feature}_{last}", f"{layer}_{feature}-{last}", layer, feature, last, kind, node.name
    )


def _entry(
    name: str, node_id: str, js_id: str, layer: str, feature: int, position: int, kind: str, label: str
) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "jsNodeId": js_id,
        "clerp": label,
        "influence": None,
        "activation": None,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "component": name,
    }


def _links(circuit: Circuit, ids: Mapping[str, str]) -> list[dict[str, Any]]:
    """A link for each pair of components, with the scores of the edges between them."""
    table = circuit.to_dataframe()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for writer, reader, target, score in zip(
        table["writer"], table["reader"], circuit.targets(table["reader"]), table["score"], strict=True
    ):
        link = found.setdefault((writer, target), {"source": ids[writer], "target": ids[target], "readers": {}})
        link["readers"][reader] = None if score != score else float(score)
    for link in found.values():
        link["weight"] = float(sum(1.0 if score is None else score for score in link["readers"].values()))
    return list(found.values())
