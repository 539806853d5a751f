"""CircuitKIT: edge and node attribution, circuits of edges, and the experiment of automatic circuit discovery, as published."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hooked_lm.analysis import BackwardRules, attribute
from hooked_lm.analysis.attribution.backward_rules import RELP
from tests.clients import circuitkit_run
from tests.clients.circuitkit_run import MODELS, circuitkit, everything, made
from tests.close import GRADIENT, assert_close


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Tensor], Any]]:
    """The same calls of the same program on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("theirs")
    program = circuitkit_run.__file__
    subprocess.run([sys.executable, program, str(original), str(out)], check=True, capture_output=True)
    found = {}
    for name in MODELS:
        with safe_open(out / f"{name}.safetensors", "pt") as file:
            keys = file.keys()
            found[name] = {key: file.get_tensor(key) for key in keys}, json.loads(file.metadata()["said"])
    return found


@pytest.mark.filterwarnings("ignore:transformer-lens 3.9.0 is installed")
@pytest.mark.filterwarnings("ignore:Finished iterating", "ignore:We shall overwrite the ref_ds")  # the search says so
@pytest.mark.parametrize("name", MODELS)
def test_as_with_the_original(name: str, theirs: dict[str, tuple[dict[str, Tensor], Any]]) -> None:
    """Scores of every method, circuits and what they say, each step of the search and the edges that it leaves."""
    found, said = everything(name)
    expected, expected_said = theirs[name]
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert_close(value, expected[key], depth=GRADIENT, msg=lambda text, key=key: f"{key}: {text}")
    assert said == expected_said
    assert found["edges EAP sum"].abs().max() > 0.01
    if name == "gpt2":
        assert 0 < len(said["left {}"]) < 1000
        assert found["experiment {}"][-1, 0] > 0


@pytest.mark.filterwarnings("ignore:transformer-lens 3.9.0 is installed")
def test_a_length_for_a_while() -> None:
    """It sets `cfg.n_ctx` of a model that is built, tokenizes, and sets it back."""
    circuitkit()
    from circuitkit.backends.eap.eap_utils import tokenize_plus

    model = made("gpt2")
    tokens, mask, lengths, n_pos = tokenize_plus(model, ["w5 w9 w12 w7", "w8 w3"], max_length=3)
    assert n_pos == 3
    assert torch.equal(tokens, torch.tensor([[1, 5, 9], [1, 8, 3]]))
    assert torch.equal(lengths, torch.tensor([3, 3]))
    assert mask.all()
    assert model.cfg.n_ctx == 24
    assert model(torch.zeros(1, 24, dtype=torch.long)).shape == (1, 24, 60)


@pytest.mark.filterwarnings("ignore:transformer-lens 3.9.0 is installed")
@pytest.mark.parametrize("name", ["gpt2", "parallel"])
def test_the_relevance_of_heads(name: str) -> None:
    """Its RelP, whose patterns are constants; of gated MLPs it has another rule. It divides sums over batches of means by the
    number of prompts. Heads alone are compared: its numbers for MLPs are no products of gradients and differences, those of its
    plain method neither."""
    circuitkit()
    from circuitkit.backends.eap import attribute_node, graph

    model = made(name)
    theirs = graph.Graph.from_model(model, node_scores=True)
    batches = circuitkit_run.Batches()
    attribute_node.attribute_node(model, theirs, batches, circuitkit_run.difference, method="relp", quiet=True)
    clean, corrupted, labels = circuitkit_run.CLEAN, circuitkit_run.CORRUPTED, circuitkit_run.LABELS
    rules = BackwardRules(**{**RELP.settings, "q_scale": 0.0, "k_scale": 0.0})
    found = attribute(
        model,
        corrupted,
        clean,
        metric=lambda logits: logits[range(4), -1, labels[:, 1]] - logits[range(4), -1, labels[:, 0]],
        sites="z",
        heads="each",
        positions=None,
        direction="noise",
        backward=rules,
        check=False,
    )
    ours = found.effects().mean * len(clean) / len(batches[0][0])
    heads = [place for place, node in enumerate(theirs.nodes) if node.startswith("a")]
    assert_close(theirs.nodes_scores[heads].view(2, 4) * len(clean), ours, depth=GRADIENT)
