"""circuit-tracer: transcoders in the place of MLPs, attribution graphs between their features, interventions on them."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hooked_lm import HookedTransformer
from tests.clients import circuit_tracer_run
from tests.clients.circuit_tracer_run import PROMPT, cases, filled, replacement, results
from tests.close import GRADIENT, assert_close

logging.getLogger("circuit_tracer").setLevel(logging.ERROR)  # it warns of graphs that have no name
TEXT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same calls of the same program on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("run") / "theirs.safetensors"
    program = circuit_tracer_run.__file__
    subprocess.run([sys.executable, program, str(original), str(out)], check=True, capture_output=True)
    return load_file(out)


@pytest.mark.parametrize("case", cases(), ids="/".join)
def test_as_with_the_original(case: tuple[str, str, str], theirs: dict[str, Tensor]) -> None:
    """Graphs, features, pruned graphs, interventions with and without frozen parts, generation."""
    found = results(*case)
    assert len(found) > 45
    for key, value in found.items():
        expected = theirs[f"{'/'.join(case)}/{key}"]
        if value.is_floating_point():
            assert_close(value, expected, depth=GRADIENT, msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert torch.equal(value, expected), key
    changed = found["frozen: logits"] - found["plain"]
    assert changed.abs().max() > 0.1, "an intervention that does nothing proves nothing"


def test_what_it_leaves_on_a_model() -> None:
    """Its permanent hooks survive resets; a run afterwards is as before; the last reset takes everything away."""
    model = replacement("gemma2", "plain", "stream")
    before = model(PROMPT[None])
    permanent = {name for name, point in model.all_points().items() if point.fwd_hooks}
    assert {"hook_embed", "ln_final.hook_scale", "blocks.2.ln2_post.hook_scale"} <= permanent
    model.feature_intervention(PROMPT, [(0, 2, 3, 4.0)])
    model.reset_hooks()
    assert {name for name, point in model.all_points().items() if point.fwd_hooks} == permanent
    assert torch.equal(model(PROMPT[None]), before)
    model.reset_hooks(including_permanent=True)
    assert not any(point.has_hooks() for point in model.all_points().values())


# ---- the bundled model -----------------------------------------------------------------------------------------------


def of_demo() -> Any:
    from circuit_tracer import ReplacementModel
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet

    plain = HookedTransformer.from_pretrained("demo")
    size, n_layers = plain.cfg.d_model, plain.cfg.n_layers
    each = {
        layer: SingleLayerTranscoder(size, 3 * size, torch.nn.functional.relu, layer, dtype=torch.float32)
        for layer in range(n_layers)
    }
    transcoders = filled(TranscoderSet(each, "ln2.hook_normalized", "hook_mlp_out", scan="mine"), 0.05)
    model = ReplacementModel.from_pretrained_and_transcoders("demo", transcoders, device=torch.device("cpu"))
    assert isinstance(model, HookedTransformer)
    return model


@pytest.fixture(scope="module")
def demo() -> Any:
    return of_demo()


@pytest.fixture(scope="module")
def graph(demo: Any) -> Any:
    from circuit_tracer import attribute

    tokens = demo.to_tokens(TEXT)[0]  # its own way to a first token misses one whose id is 0
    return attribute(tokens, demo, max_n_logits=3, batch_size=64, max_feature_nodes=300)


def test_the_model_says_the_same(demo: Any) -> None:
    """Transcoders change gradients alone: what they miss is added as an error."""
    plain = HookedTransformer.from_pretrained("demo", fold_ln=False, center_writing_weights=False, center_unembed=False)
    assert_close(demo(TEXT), plain(TEXT))
    assert_close(demo.get_activations(TEXT)[0], plain(TEXT))


def test_an_edge_is_what_an_intervention_does(demo: Any, graph: Any) -> None:
    """With attention and norms frozen a feature acts on others and on logits linearly: by its edges."""
    tokens, n_logits = graph.input_tokens, len(graph.logit_targets)
    features = graph.active_features[graph.selected_features]
    n = len(features)
    assert n == 300
    adjacency, ids = graph.adjacency_matrix, graph.logit_token_ids
    how = {"constrained_layers": range(demo.cfg.n_layers), "apply_activation_function": False}
    logits, before = demo.feature_intervention(tokens, [], **how)
    strongest = adjacency[-n_logits:, :n].abs().sum(0).topk(5).indices
    for node in strongest:
        layer, pos, feature = features[node].tolist()
        value = graph.activation_values[graph.selected_features[node]]
        after, activations = demo.feature_intervention(tokens, [(layer, pos, feature, 2 * value)], **how)
        moved = (activations - before)[tuple(features.T)]
        moved[node] = 0
        edges = adjacency[:n, node]
        assert_close(moved, edges, scale=before.abs().max())
        change = after[0, -1] - logits[0, -1]
        assert_close((change - change.mean())[ids], adjacency[-n_logits:, node], scale=logits.abs().max())
    assert adjacency[-n_logits:, strongest].abs().max() > 0.01


def test_a_graph_is_kept_and_written(graph: Any, demo: Any, tmp_path: Path) -> None:
    from circuit_tracer import Graph
    from circuit_tracer.utils import create_graph_files

    graph.to_pt(str(tmp_path / "graph.pt"))
    again = Graph.from_pt(str(tmp_path / "graph.pt"))
    assert torch.equal(again.adjacency_matrix, graph.adjacency_matrix)
    assert again.cfg.n_layers == demo.cfg.n_layers
    again.cfg.tokenizer_name = demo.tokenizer.name_or_path
    create_graph_files(again, slug="mine", output_path=str(tmp_path), node_threshold=0.5, edge_threshold=0.5)
    assert (tmp_path / "mine.json").stat().st_size > 1000
