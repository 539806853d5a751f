"""auto-circuit: it puts modules of its own into the places of hook points, and finds and cuts edges between heads and MLPs."""

from typing import Any

import pytest
import torch
from auto_circuit.data import PromptDataLoader, PromptDataset
from auto_circuit.prune import run_circuits
from auto_circuit.prune_algos.edge_attribution_patching import edge_attribution_patching_prune_scores
from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
from auto_circuit.utils.graph_utils import patchable_model
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo.experiment import prompt_pairs
from tests.close import assert_apart, assert_close

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    model = HookedTransformer.from_pretrained("demo")
    model.requires_grad_(False)
    pairs = prompt_pairs(3)
    clean, corrupted = (model.to_tokens([getattr(pair, side) for pair in pairs]) for side in ("clean", "corrupted"))
    answers, wrong = (
        [torch.tensor([model.to_single_token(getattr(pair, which))]) for pair in pairs]
        for which in ("answer", "wrong_answer")
    )
    said = {"clean": model(clean)[:, -1], "corrupted": model(corrupted)[:, -1]}
    model.set_use_attn_result(True)
    model.set_use_hook_mlp_in(True)
    model.set_use_split_qkv_input(True)
    loader = PromptDataLoader(
        PromptDataset(list(clean), list(corrupted), answers, wrong), seq_len=None, diverge_idx=0, batch_size=3
    )
    wrapped = patchable_model(model, factorized=True, slice_output="last_seq", separate_qkv=True)
    scores = mask_gradient_prune_scores(wrapped, loader, None, "logit", "avg_diff", mask_val=0.0)
    return {**said, "loader": loader, "model": wrapped, "scores": scores, "tokens": clean}


def circuits(found: Found, scores: dict[str, Tensor], sizes: list[int]) -> dict[int, Tensor]:
    """What its circuits of so many edges say at the last token, in the corrupted run with these edges from the clean one."""
    runs = run_circuits(found["model"], found["loader"], sizes, scores)
    return {size: next(iter(batches.values())) for size, batches in runs.items()}


def test_its_graph_is_that_of_the_model(found: Found) -> None:
    """Every head reads through three inputs, each MLP and the end through one, what everything before them wrote."""
    n_layers, n_heads = 4, 8
    writers = [1 + layer * (n_heads + 1) for layer in range(n_layers + 1)]  # before each layer, and in the end
    expected = sum(3 * n_heads * n + n + n_heads for n in writers[:-1]) + writers[-1]
    assert len(found["model"].edges) == expected
    assert_close(found["model"](found["tokens"])[:, -1], found["clean"])


def test_no_edge_and_all_edges(found: Found) -> None:
    n_edges = len(found["model"].edges)
    said = circuits(found, found["scores"], [0, n_edges])
    assert_close(said[n_edges], found["clean"])
    assert_close(said[0], found["corrupted"])
    assert_apart(found["clean"], found["corrupted"])


def test_the_edges_of_the_highest_scores_carry_the_answer(found: Found) -> None:
    best = circuits(found, found["scores"], [150])[150]
    turned = {name: 1 / (score.abs() + 1e-6) for name, score in found["scores"].items()}
    worst = circuits(found, turned, [150])[150]
    distance = (found["clean"] - found["corrupted"]).norm()
    assert (best - found["clean"]).norm() < 0.2 * distance
    assert (worst - found["clean"]).norm() > 0.5 * distance


def test_both_of_its_ways_to_a_score_agree(found: Found) -> None:
    """One takes gradients of masks, the other our backward hooks: edge attribution patching."""
    other = edge_attribution_patching_prune_scores(found["model"], found["loader"], None)
    assert other.keys() == found["scores"].keys()
    for name, score in found["scores"].items():
        assert_close(other[name], score)
    assert max(score.abs().max() for score in other.values()) > 1
