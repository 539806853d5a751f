"""Attribution graphs in the JSON that Neuronpedia and the viewer of circuit-tracer read, and back.

The format has `metadata`, `qParams` (the state of the viewer), `nodes` and `links`. Nodes that are written here have further
fields, which a viewer does not read, so that a graph comes back as it was.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hooked_lm.analysis.circuits.neuronpedia import check_slug
from hooked_lm.analysis.graphs import influence
from hooked_lm.analysis.graphs.graph import ERROR, FEATURE, TARGET, TOKEN, AttributionGraph, checked_labels
from hooked_lm.files import replacing, writable

__all__ = ["from_neuronpedia", "to_neuronpedia"]

KINDS = {FEATURE: "cross layer transcoder", ERROR: "mlp reconstruction error", TOKEN: "embedding", TARGET: "logit"}
VIRTUAL = 10_000_000  # from here on ids of targets that are no tokens, if the size of the vocabulary is not known
NAMED = "graph-metadata.json"
Node = dict[str, Any]


def to_neuronpedia(
    graph: AttributionGraph,
    path: str | Path,
    *,
    nodes: float = 0.8,
    edges: float = 0.98,
    slug: str = "graph",
    scan: str | None = None,
    labels: Mapping[str, str] | None = None,
    listed: bool = False,
) -> Path:
    """Writes an attribution graph, pruned, as JSON for Neuronpedia and the viewer of circuit-tracer; returns the path.

    Of the same graph circuit-tracer writes the same nodes, links and settings; `influence` of a node is there the share of the
    influence that nodes up to this one have together, from the largest on, so a viewer can hide the others.

    Args:
        graph: the whole graph, whose influences decide what is kept.
        nodes, edges: the shares of influence that are kept, as in `AttributionGraph.pruned`.
        slug: the name of the graph in the viewer: small letters, digits and hyphens.
        scan: the id of the transcoders in the viewer, which finds their features by it; by default the name of the model. For
            neurons it is "neurons of MODEL", so that a viewer shows no features of that model beside them.
        labels: texts of nodes by name, as `{"L1F17@3": "names"}`.
        listed: also adds the graph to `graph-metadata.json` in the same folder, from which circuit-tracer's server lists graphs.

    Raises ValueError for an unsuitable slug and labels of other nodes, and OSError if the file cannot be written.

    >>> import tempfile
    >>> edges = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 1.0, 0.0]])
    >>> zeros = torch.zeros(3)
    >>> graph = AttributionGraph(
    ...     torch.tensor([[0, 0, 7]]),
    ...     torch.zeros(0, 2, dtype=torch.long),
    ...     ["The"],
    ...     ["logit ' end'"],
    ...     edges,
    ...     torch.tensor([1.5]),
    ...     torch.tensor([0.9]),
    ...     zeros,
    ...     zeros,
    ...     zeros,
    ...     torch.tensor([5]),
    ...     torch.tensor([8]),
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = to_neuronpedia(graph, f"{folder}/graph.json", nodes=1, edges=1)
    ...     [node["node_id"] for node in json.loads(path.read_text())["nodes"]]
    ...     bool((from_neuronpedia(path).adjacency == edges).all())
    ['0_7_0', 'E_5_0', '2_8_0']
    True
    """
    check_slug(slug)
    labels = checked_labels(graph, labels)
    writable(path)
    content = _content(graph, nodes, edges, slug, scan, labels)
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")
    if listed:
        _list(Path(path).parent / NAMED, content["metadata"])
    return Path(path)


def from_neuronpedia(path: str | Path) -> AttributionGraph:
    """The attribution graph in a file that `to_neuronpedia`, circuit-tracer or Neuronpedia wrote, as much as it has of it.

    A file of others has no biases and no totals: a total is then what its edges sum to; and scores are those of the part that it
    has. A token without a node in the file has one without edges, with the id -1. Raises ValueError for any other file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return _graph(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no attribution graph of features in JSON: {error!r}") from None


# ---- the file ----------------------------------------------------------------------------------------------------------------


def _content(
    graph: AttributionGraph, nodes: float, edges: float, slug: str, scan: str | None, labels: Mapping[str, str]
) -> dict[str, Any]:
    n_ends = len(graph.tokens) + len(graph.targets)
    kept, links = influence.pruned(graph.adjacency, graph.weights, len(graph.features), n_ends, nodes, edges)
    shares, ids = influence.cumulative(graph.influence), node_ids(graph)
    inside = (links & kept[:, None] & kept[None] & (graph.adjacency != 0)).nonzero().tolist()
    ends = {node for pair in inside for node in pair}
    written = [
        _node(graph, node, ids[node], float(shares[node]), labels)
        for node in kept.nonzero()[:, 0].tolist()
        if node in ends or graph.kinds[node] in (TOKEN, TARGET)
    ]
    about = {key: value for key, value in graph.about.items() if isinstance(value, (str, int, float, bool))}
    return {
        "metadata": {
            "slug": slug,
            "scan": scan or str(graph.about.get("scan") or _scan(graph)),
            "transcoder_list": [],
            "prompt_tokens": list(graph.tokens),
            "prompt": str(graph.about.get("prompt") or "".join(graph.tokens)),
            "node_threshold": nodes,
            "schema_version": 1,
            "info": {"generator": {"name": "hooked_lm", "version": graph.about.get("hooked_lm", "")}},
            "generation_settings": about,
            "unit": graph.unit,
            "checks": dict(graph.completeness),
            "scores": dict(graph.scores),
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [
                [name, *(ids[node] for node in of if node in ends)] for name, of in graph.supernodes.items()
            ],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": written,
        "links": [
            {"source": ids[source], "target": ids[target], "weight": float(graph.adjacency[target, source])}
            for target, source in inside
        ],
    }


def _scan(graph: AttributionGraph) -> str:
    """The name under which a viewer looks for the features of a graph."""
    model = str(graph.about.get("model", "unknown"))
    return model if graph.unit == FEATURE else f"{graph.unit}s of {model}"


def n_layers(graph: AttributionGraph) -> int:
    """The number of layers of the model, or as many as its nodes show."""
    layers = torch.cat([graph.features[:, 0], graph.errors[:, 0]])
    return int(graph.about.get("n_layers", int(layers.max()) + 1 if len(layers) else 0))


def node_ids(graph: AttributionGraph) -> list[str]:
    """The id of each node in the file; an error has the id of a feature of layer 0, unless there is this feature too."""
    features = [f"{layer}_{index}_{position}" for layer, position, index in graph.features.tolist()]
    errors = [f"0_{layer}_{position}" for layer, position in graph.errors.tolist()]
    errors = [f"{name}_error" if name in features else name for name in errors]
    tokens = [f"E_{token}_{position}" for position, token in enumerate(graph.token_ids.tolist())]
    ends = zip(_target_ids(graph), graph.target_positions, strict=True)
    targets = [f"{n_layers(graph) + 1}_{target}_{position}" for target, position in ends]
    return [*features, *errors, *tokens, *targets]


def _target_ids(graph: AttributionGraph) -> list[int]:
    """The ids of the targets; those that are no tokens follow the vocabulary."""
    first = int(graph.about.get("d_vocab", VIRTUAL))
    return [first + place if token < 0 else token for place, token in enumerate(graph.target_ids.tolist())]


def _node(graph: AttributionGraph, node: int, node_id: str, share: float, labels: Mapping[str, str]) -> Node:
    """A node of the file."""
    kind, place, label = (
        graph.kinds[node],
        node - graph.slice_of(graph.kinds[node]).start,
        labels.get(graph.names[node], ""),
    )
    entry: Node = {"node_id": node_id, "feature_type": KINDS[kind], "run_idx": 0, "reverse_ctx_idx": 0}
    entry |= {"token_prob": 0.0, "is_target_logit": False, "influence": share, "activation": None}
    own = {"clerp": label, "total": float(graph.totals[node]), "bias": float(graph.biases[node])}
    entry |= own | {"others": float(graph.others[node])}
    if kind == FEATURE:
        layer, position, index = graph.features[place].tolist()
        return entry | {
            "feature": (layer + index) * (layer + index + 1) // 2 + index,  # one number for both
            "layer": str(layer),
            "ctx_idx": position,
            "jsNodeId": f"{layer}_{index}-0",
            "activation": float(graph.activations[place]),
        }
    if kind == ERROR:
        layer, position = graph.errors[place].tolist()
        return entry | {"feature": -1, "layer": str(layer), "ctx_idx": position, "jsNodeId": f"{layer}_{position}-0"}
    if kind == TOKEN:
        token = int(graph.token_ids[place])
        return entry | {"feature": place, "layer": "E", "ctx_idx": place, "jsNodeId": f"E_{token}-{place}"}
    target, position, probability = (
        _target_ids(graph)[place],
        graph.target_positions[place],
        float(graph.probabilities[place]),
    )
    return entry | {
        "feature": target,
        "layer": str(n_layers(graph) + 1),
        "ctx_idx": position,
        "jsNodeId": f"L_{target}-{position}",
        "token_prob": probability,
        "is_target_logit": place == 0,
        "influence": None,
        "clerp": label or f'Output "{_said(graph.targets[place])}" (p={probability:.3f})',
        "target": graph.targets[place],
        "target_id": int(graph.target_ids[place]),
        "target_site": graph.reads[place][0] if graph.reads else "",
    }


def _said(target: str) -> str:
    """A target without the quotes around its token, as "logit ' Mary'"."""
    match = re.fullmatch(r"logit '(.*)'", target, re.DOTALL)
    return match[1] if match else target


def _list(path: Path, metadata: Mapping[str, Any]) -> None:
    """Adds a graph to the list of a folder, in place of one of the same name."""
    graphs = json.loads(path.read_text(encoding="utf-8"))["graphs"] if path.exists() else []
    graphs = [one for one in graphs if one["slug"] != metadata["slug"]]
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps({"graphs": [*graphs, metadata]}, indent=2, allow_nan=False), encoding="utf-8")


# ---- and back ----------------------------------------------------------------------------------------------------------------


def _graph(content: Mapping[str, Any]) -> AttributionGraph:
    kinds = {word: kind for kind, word in KINDS.items()}
    of: dict[str, list[Node]] = {kind: [] for kind in KINDS}
    for node in content["nodes"]:
        of[kinds[node["feature_type"]]].append(node)
    words, known = content["metadata"]["prompt_tokens"], {int(node["ctx_idx"]): node for node in of[TOKEN]}
    if unknown := [position for position in known if not 0 <= position < len(words)]:
        raise ValueError(f"a token is at position {unknown[0]}, and the prompt has {len(words)} tokens")
    of[TOKEN] = [known.get(place, {"node_id": f"E_-1_{place}", "ctx_idx": place}) for place in range(len(words))]
    order = [node for kind in KINDS for node in of[kind]]
    place = {node["node_id"]: i for i, node in enumerate(order)}
    adjacency = torch.zeros(len(order), len(order))
    for link in content["links"]:
        adjacency[place[link["target"]], place[link["source"]]] = link["weight"]
    features = [(int(node["layer"]), int(node["ctx_idx"]), int(node["node_id"].split("_")[1])) for node in of[FEATURE]]
    errors = [(int(node["layer"]), int(node["ctx_idx"])) for node in of[ERROR]]
    metadata, sums = content["metadata"], adjacency.sum(1).tolist()
    ids = [int(node["node_id"].split("_")[1]) for node in of[TOKEN]]
    target_ids = [int(node["target_id"] if "target_id" in node else node["feature"]) for node in of[TARGET]]
    about = {"prompt": metadata["prompt"], "scan": metadata["scan"], **(metadata.get("generation_settings") or {})}
    about |= {"n_layers": int(of[TARGET][0]["layer"]) - 1} if of[TARGET] else {}
    about |= {"pruned": {"scores": metadata["scores"]}} if "scores" in metadata else {}
    groups = [group for group in content["qParams"].get("supernodes", ()) if len(group) > 1]
    return AttributionGraph(
        features=torch.tensor(features, dtype=torch.long).view(-1, 3),
        errors=torch.tensor(errors, dtype=torch.long).view(-1, 2),
        tokens=list(words),
        targets=[str(node.get("target") or node["clerp"] or node["node_id"]) for node in of[TARGET]],
        adjacency=adjacency,
        activations=torch.tensor([node["activation"] or 0.0 for node in of[FEATURE]]),
        probabilities=torch.tensor([float(node["token_prob"]) for node in of[TARGET]]),
        totals=torch.tensor([float(node.get("total", total)) for node, total in zip(order, sums, strict=True)]),
        biases=torch.tensor([float(node.get("bias", 0.0)) for node in order]),
        others=torch.tensor([float(node.get("others", 0.0)) for node in order]),
        token_ids=torch.tensor(ids, dtype=torch.long),
        target_ids=torch.tensor(target_ids, dtype=torch.long),
        unit=metadata.get("unit", FEATURE),
        completeness=metadata.get("checks", {}),
        reads=[(node.get("target_site", ""), int(node["ctx_idx"])) for node in of[TARGET]],
        supernodes={group[0]: [place[node] for node in group[1:] if node in place] for group in groups},
        about=about,
    )
