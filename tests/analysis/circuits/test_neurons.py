"""Circuits of neurons: their effects and edges against formulas of toys, and planted neurons."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, planted
from hooked_lm.analysis import attribute
from hooked_lm.analysis.circuits import NeuronCircuit, neuron_circuit
from hooked_lm.analysis.circuits.circuit import SEEN
from hooked_lm.analysis.circuits.neuron_runs import ALL, CIRCUIT
from hooked_lm.analysis.circuits.neurons import INPUT, LOGITS, OTHERS
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.engine.identity import identities
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked
from tests.unchecked import unchecked

CORRUPTED, CLEAN = torch.tensor([[1, 4, 2], [5, 3, 7]]), torch.tensor([[1, 6, 2], [5, 8, 7]])


def logits_of_last(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def toy(**more: Any) -> HookedTransformer:
    sizes = {
        "n_layers": 3,
        "d_model": 8,
        "n_heads": 2,
        "n_ctx": 4,
        "d_vocab": 11,
        "d_mlp": 4,
        "act_fn": "gelu",
        "seed": 0,
    }
    return HookedTransformer(HookedTransformerConfig(**{**sizes, "initializer_range": 0.6, **more})).double()


def found_in(
    model: HookedTransformer, n_neurons: int, corrupted: Tensor = CORRUPTED, clean: Tensor = CLEAN, **more: Any
) -> NeuronCircuit:
    with unchecked():
        given = {"metric": logits_of_last, "check": False, **more}
        return neuron_circuit(model, corrupted, clean, n_neurons=n_neurons, **given)


@pytest.mark.parametrize("backward", ["plain", "relp", "gim"])
def test_edges_into_all_neurons_and_the_logits_are_the_whole_effect(backward: str):
    """Nothing flows through others than all neurons that an exchange of the second token reaches, in the last layer at the last
    position alone."""
    model = toy()
    found = found_in(model, 2 * 2 * 4 + 4, backward=backward, n_random=0)
    others = found.edges[:, found.targets.index(OTHERS)]
    assert_close(others, torch.zeros_like(others), depth=GRADIENT, scale=found.effects.abs().max())
    with unchecked():
        common = {"metric": logits_of_last, "direction": "noise", "backward": backward, "check": False}
        nodes = attribute(model, CORRUPTED, CLEAN, sites="post", neurons="each", **common).effects().values
        stream = (
            attribute(model, CORRUPTED, CLEAN, sites="resid_pre", layers=[0], positions=None, **common).effects().values
        )
    layers, positions, neurons = found.neurons.T
    assert_close(found.effects, nodes[layers, positions, neurons])
    assert_close(found.edges[-1].sum(0), stream.flatten(0, -2).sum(0), depth=GRADIENT)
    few = found_in(model, 5, backward=backward, n_random=0)
    assert_apart(few.edges[:, few.targets.index(OTHERS)].abs().max(), torch.tensor(0.0))


def test_an_edge_by_its_formula():
    """Without attention and norms: what a neuron writes, read by a later one, times the gradient of that."""
    model = toy(n_layers=2, normalization_type=None, act_fn="relu")
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.W_O)
    prompts = CORRUPTED.flip(1), CLEAN.flip(1) + torch.tensor([0, 0, 2])  # other last tokens
    found = found_in(model, 5, *prompts, backward="plain", n_random=0)
    names = [f"blocks.{layer}.mlp.hook_{name}" for layer in (0, 1) for name in ("pre", "post")]
    new, old = (model.run_with_cache(each, names_filter=names)[1] for each in prompts)
    first, second = model.blocks[0].mlp, model.blocks[1].mlp
    unembed = (model.W_U[:, 3] - model.W_U[:, 5]).detach()
    place = {tuple(row): i for i, row in enumerate(found.neurons.tolist())}
    n_edges = 0
    for (layer, position, neuron), row in place.items():
        change = (new["post", layer] - old["post", layer])[:, position, neuron].detach()
        mlp = model.blocks[layer].mlp
        direct = change * (mlp.W_out[neuron] @ unembed).detach() * (position == 2)
        assert_close(found.edges[row, found.targets.index(LOGITS)], direct.float(), depth=GRADIENT, dtype=torch.float32)
        for (later, at, other), column in place.items():
            if (layer, later) == (0, 1) and at == position:
                slope = (second.W_out[other] @ unembed) * (position == 2) * (old["pre", 1][:, at, other] > 0)
                edge = change * (first.W_out[neuron] @ second.W_in[:, other]) * slope
                assert_close(found.edges[row, column], edge.detach().float(), depth=GRADIENT, dtype=torch.float32)
                n_edges += int(edge.abs().max() > 0)
            elif later <= layer or at < position:
                assert not found.edges[row, column].any()
    assert n_edges > 0


def test_runs_that_keep_neurons():
    model = toy()
    everything = found_in(model, 20, n_random=0)
    assert_close(everything.kept.select(neurons=CIRCUIT).values, everything.kept.select(neurons=ALL).values)
    assert_close(everything.faithfulness, 1.0)
    few = found_in(model, 8, n_random=3)
    assert few.random_faithfulness.shape == (3,)
    assert few.random_faithfulness.unique().numel() > 1
    with torch.no_grad():
        _, cache = model.run_with_cache(CORRUPTED, names_filter=[f"blocks.{layer}.mlp.hook_post" for layer in range(3)])
        hooks = [(site, lambda value, hook: cache[hook.name]) for site in cache]
        none = logits_of_last(model.run_with_hooks(CLEAN, fwd_hooks=hooks))
    assert_close(everything.kept.select(neurons="no neurons").values, none.float(), dtype=torch.float32)


def test_planted_neurons_recover_more_than_random_ones():
    example = planted.load("xor-gate")
    assert example.neurons is not None
    n_true = int(example.neurons.sum())
    with unchecked():
        found = neuron_circuit(example.model, example.pairs, n_neurons=n_true, backward="plain", check=False)
    assert found.faithfulness > found.random_faithfulness.max() + 0.3
    chosen = example.neurons[found.neurons[:, 0], found.neurons[:, 2]]
    assert chosen.float().mean() > 0.9


def test_neurons_are_judged_on_pairs_that_the_search_did_not_see():
    model = HookedTransformer.from_pretrained("demo")
    pairs = prompt_pairs(8)
    texts = [[getattr(pair, name) for pair in pairs] for name in ("corrupted", "clean", "answer", "wrong_answer")]
    with unchecked():
        given: dict[str, Any] = {"answers": tuple(texts[2:]), "n_neurons": 30, "check": False, "n_random": 1}
        found = neuron_circuit(model, *texts[:2], **given)
        same = neuron_circuit(model, *texts[:2], held_out=0, **given)
        rows = [
            place
            for place, name in enumerate(identities(model, model.to_tokens(texts[1])))
            if name in found.about[SEEN]
        ]
        some = [[text[row] for row in rows] for text in texts]
        alone = neuron_circuit(model, *some[:2], **{**given, "answers": tuple(some[2:])})
    assert len(rows) == found.effects.shape[1] == found.kept.n_prompts == 4
    assert torch.equal(found.neurons, alone.neurons)
    assert "did not see" in repr(found)
    assert "same prompts as the search" in repr(same)
    assert same.kept.n_prompts == 8


def test_a_circuit_tells_saves_and_draws_itself(tmp_path: Path):
    model = HookedTransformer.from_pretrained("demo")
    pairs = (
        ["Mary and John left, Mary", "Tom and Alice left, Tom"],
        ["Mary and John left, John", "Tom and Alice left, Alice"],
    )
    with unchecked():
        found = neuron_circuit(model, *pairs, answers=([" Mary", " Tom"], [" John", " Alice"]), n_neurons=12, check=50)
    assert "12 neurons" in repr(found)
    assert "Spearman" in repr(found)
    assert set(found.nodes().columns) == {"name", "layer", "position", "token", "neuron", "effect", "direct", "inside"}
    assert {*found.to_dataframe()["source"]} <= {*found.names, INPUT}
    assert len(found.plot(n_edges=5).to_html()) > 1000
    found.save(tmp_path / "a.safetensors")
    same = NeuronCircuit.load(tmp_path / "a.safetensors")
    assert torch.equal(same.edges, found.edges)
    assert repr(same) == repr(found)
    with pytest.raises(ValueError, match="n_edges must be at least 1, got 0"):
        found.plot(n_edges=0)


def test_wrong_arguments():
    model = toy()
    for wrong, message in (
        ({"n_neurons": 0}, "n_neurons must be a whole number from 1 on, got 0"),
        ({"n_neurons": 30}, "n_neurons=30, and 20 neurons at positions have an effect"),
        ({"n_neurons": 3, "n_random": -1}, "n_random must not be negative, got -1"),
        (
            {"n_neurons": 3, "metric": lambda logits: logits.mean()},
            "one number for all prompts: edges need one for each",
        ),
        ({"n_neurons": 3, "backward": "lrp"}, "backward must be one of 'plain', 'relp', 'gim'"),
    ):
        with pytest.raises(ValueError, match=message):
            found_in(model, **wrong)
    with pytest.raises(ValueError, match="neurons of experts are no nodes"):
        found_in(hooked(next(case for case in DECODER_CASES if case.family == "mixtral")), 3)
    with pytest.raises(ValueError, match="no layer of this model has neurons"):
        found_in(toy(attn_only=True), 3)
