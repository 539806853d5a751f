"""An attribution graph that is small enough to check by hand, and large ones drawn at random."""

import torch

from hooked_lm.analysis.graphs.graph import AttributionGraph


def random_graph(
    n_layers: int = 3, n_pos: int = 5, each: int = 2, n_targets: int = 2, seed: int = 0
) -> AttributionGraph:
    """A graph with some features at each layer and position; earlier nodes have edges to later ones, about half of them."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.tensor(
        [
            (layer, position, 20 + 10 * layer + i)
            for layer in range(n_layers)
            for position in range(n_pos)
            for i in range(each)
        ]
    )
    errors = torch.tensor([(layer, position) for layer in range(n_layers) for position in range(n_pos)])
    n_features, n_errors = len(features), len(errors)
    n = n_features + n_errors + n_pos + n_targets
    layers = torch.cat([features[:, 0], errors[:, 0], torch.full((n_pos,), -1), torch.full((n_targets,), n_layers)])
    last = torch.full((n_targets,), n_pos - 1)
    positions = torch.cat([features[:, 1], errors[:, 1], torch.arange(n_pos), last])
    may = (layers[:, None] > layers[None]) & (positions[:, None] >= positions[None])
    may[n_features : n_features + n_errors + n_pos] = False
    edges = torch.randn(n, n, generator=draw) * may * (torch.rand(n, n, generator=draw) < 0.5)
    biases = torch.randn(n, generator=draw) * may.any(1)
    return AttributionGraph(
        features=features,
        errors=errors,
        tokens=["<|endoftext|>", *[f" word{i}" for i in range(1, n_pos)]],
        targets=[f"logit ' target{i}'" for i in range(n_targets)],
        adjacency=edges,
        activations=torch.rand(n_features, generator=draw) + 0.1,
        probabilities=torch.linspace(0.6, 0.2, n_targets),
        totals=edges.sum(1) + biases,
        biases=biases,
        others=torch.zeros(n),
        token_ids=torch.arange(n_pos),
        target_ids=torch.arange(40, 40 + n_targets),
        completeness={"sums": 3e-7},
        about={"model": "toy", "n_layers": n_layers, "prompt": "a prompt"},
    )
