"""QK attribution: terms that sum to attention scores, change as they say, and name the pair that a planted head uses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer, planted
from hooked_lm.analysis import QKAttribution, qk_attribution
from tests.close import GRADIENT, assert_apart, assert_close

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def sums(found: QKAttribution) -> Tensor:
    axes = list(found.axes)
    return found.values.sum((axes.index("query_source"), axes.index("key_source")))


def assert_sums(found: QKAttribution) -> None:
    spread = found.values.square().nansum(tuple(range(found.values.ndim - 2))).sqrt().max()
    assert found.scores is not None
    assert_close(sums(found), found.scores, GRADIENT, scale=float(max(spread, found.scores.abs().nan_to_num().max())))


@pytest.mark.parametrize("by", ["layer", "head"])
def test_terms_sum_to_the_scores(model: HookedTransformer, by: str):
    found = qk_attribution(model, PROMPT, ["L2H3", "L2H0"], by=by, positions=9, control=None)
    assert list(found.axes) == ["head", "query_source", "key_source", "position"]
    assert_sums(found)
    scores = model.run_with_cache(PROMPT, names_filter="blocks.2.attn.hook_attn_scores")[1]["attn_scores", 2]
    assert found.scores is not None
    assert_close(found.scores[..., 0], scores[0, [3, 0], 9, :10])
    assert found.completeness < 1e-5


# ---- what a term predicts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_source_that_is_taken_out_changes_the_score_by_its_terms(model: HookedTransformer, side: str):
    """Where the head reads it, with the scale of the norm held fixed, in the model itself."""
    found = qk_attribution(model, PROMPT, "L2H3", control=None)
    _, cache = model.run_with_cache(PROMPT)
    site = f"blocks.2.hook_{side}_input"
    kept = cache["scale", 2, "ln1"]

    def take_out(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 3] -= cache["mlp_out", 0]
        return value

    def freeze(value: Tensor, hook: Any) -> Tensor:
        return kept[:, :, None].expand_as(value) if value.ndim == 4 else kept

    hooks = [(site, take_out), ("blocks.2.ln1.hook_scale", freeze)]
    with model.hooks(fwd_hooks=hooks):
        _, changed = model.run_with_cache(PROMPT, names_filter="blocks.2.attn.hook_attn_scores")
    difference = (changed["attn_scores", 2] - cache["attn_scores", 2])[0, 3, -1]
    terms = found.select(**{{"q": "query_source", "k": "key_source"}[side]: "0_mlp_out"})
    assert_close(difference, -terms.mean.sum(0), GRADIENT, scale=float(found.values.abs().max()))
    assert_apart(difference, torch.zeros_like(difference))


def test_the_pair_that_a_planted_induction_head_uses():
    """The token at the query with what the previous-token head wrote at the key; in an untrained twin no pair stands out."""
    example = planted.load("soft-induction")
    found = qk_attribution(example.model, example.pairs.clean, "L1H2", by="head", control="untrained")
    sizes = found.between_keys().values.square().nanmean((2, 3)).sqrt()  # over prompts and keys
    order = sizes.flatten().argsort(descending=True).tolist()
    names = [(query, key) for query in found.axes["query_source"] for key in found.axes["key_source"]]
    assert [names[place] for place in order[:2]] == [
        ("embed", "L0H0"),
        ("pos_embed", "embed"),
    ]  # to the start, where it rests
    assert_close(sizes.flatten()[order[2:]], torch.zeros(len(order) - 2), scale=float(sizes.max()))
    assert found.control is not None
    assert not found.control.does_as_well
    terms = found.select(query_source="embed", key_source="L0H0").values
    for i, row in enumerate(torch.as_tensor(example.pairs.clean)):  # the key after the same letter has the largest term
        after = row[:-1].tolist().index(int(row[-1])) + 1
        assert int(terms[:, i].argmax()) == after


# ---- the result ------------------------------------------------------------------------------------------------------


def test_what_all_keys_have_in_common_is_nothing_between_keys(model: HookedTransformer):
    found = qk_attribution(model, PROMPT, "L1H7", control=None).between_keys()
    assert_close(found.mean.sum(-1), torch.zeros(found.mean.shape[:2]), scale=float(found.values.abs().max()) * 15)
    assert_sums(found)


def test_it_is_saved_and_loaded(model: HookedTransformer, tmp_path):
    found = qk_attribution(model, [PROMPT, PROMPT.replace("Mary", "Anna")], "L1H7", by="head")
    found.save(tmp_path / "qk")
    again = hooked_lm.load(tmp_path / "qk")
    assert isinstance(again, QKAttribution)
    assert torch.equal(again.values, found.values)
    assert again.scores is not None
    assert torch.equal(again.scores, found.scores)
    assert again.about == found.about
    assert repr(again) == repr(found)
    assert "sums differ from the scores by" in repr(found)
    assert "control (untrained twin)" in repr(found)


def test_a_figure_shows_the_pairs_at_one_key(model: HookedTransformer):
    pytest.importorskip("plotly")
    found = qk_attribution(model, PROMPT, "L1H7", control=None)
    assert found.scores is not None
    best = int(found.scores[:, 0].argmax())
    [heat] = found.plot().data
    assert heat.type == "heatmap"
    assert_close(torch.tensor(heat.z).flatten().sort().values, found.mean[..., best].flatten().sort().values)
    assert_apart(torch.tensor(found.select(position=0).plot().data[0].z), torch.tensor(heat.z))


def test_a_part_keeps_its_scores(model: HookedTransformer):
    found = qk_attribution(model, PROMPT, ["L1H7", "L1H2"], control=None)
    part = found.select(head="L1H2", position=[3, 4])
    assert part.scores is not None
    assert found.scores is not None
    assert torch.equal(part.scores, found.scores[1, 3:5])


def test_arguments(model: HookedTransformer):
    with pytest.raises(ValueError, match="heads must be of one layer, got"):
        qk_attribution(model, PROMPT, ["L1H7", "L2H0"])
    with pytest.raises(IndexError, match="there is no head L1H8: layer 1 has 8 heads"):
        qk_attribution(model, PROMPT, "L1H8")
    with pytest.raises(IndexError, match="there is no attention at layer 9"):
        qk_attribution(model, PROMPT, "L9H0")
    with pytest.raises(IndexError, match="position 99 is out of range"):
        qk_attribution(model, PROMPT, "L1H7", positions=99)
    with pytest.raises(ValueError, match="by must be 'layer' or 'head', got 'neuron'"):
        qk_attribution(model, PROMPT, "L1H7", by="neuron")
    with pytest.raises(ValueError, match="not the label of a head"):
        qk_attribution(model, PROMPT, "7")


def test_terms_that_do_not_sum_are_refused(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    """Whatever is not known of an attention shows in the sum."""
    monkeypatch.setattr(model.blocks[1].attn, "scale", 2 * model.blocks[1].attn.scale)
    qk_attribution(model, PROMPT, "L1H7", control=None)
    monkeypatch.setattr(model.blocks[1].attn, "b_Q", None)
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda q, hook: q + 1.0)]),
        pytest.raises(ValueError, match="not linear"),
    ):
        qk_attribution(model, PROMPT, "L1H7", control=None)


def test_a_bias_of_positions_is_a_term():
    """ALiBi adds its slope for each position between; no other pair has a part of it."""
    sizes = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 9,
        "d_head": 4,
        "n_heads": 4,
        "d_vocab": 20,
        "seed": 0,
        "attn_only": True,
    }
    model = HookedTransformer({**sizes, "positional_embedding_type": "alibi", "normalization_type": "LN"})
    found = qk_attribution(model, torch.tensor([[1, 5, 3, 7, 2]]), "L1H1", control=None)
    assert_sums(found)
    term = found.select(query_source="position_bias", key_source="position_bias").mean
    slope = model.blocks[1].attn.position_bias.slopes()[1]
    assert_close(term, slope * torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0]))
    assert_close(found.select(query_source="position_bias").mean.sum(), term.sum())


def test_a_cap_is_a_ratio(model: HookedTransformer):
    """Of the scores of the model with a cap, and said in the result."""
    tree = model.cfg.tree
    capped = type(model.cfg).from_tree(
        replace(tree, blocks=tuple(replace(block, attn=replace(block.attn, soft_cap=2.0)) for block in tree.blocks)),
        init_weights=False,
    )
    other = HookedTransformer(capped, tokenizer=model.tokenizer)
    other.load_state_dict(model.state_dict())
    found = qk_attribution(other, PROMPT, "L1H7", control=None)
    assert_sums(found)
    assert "soft cap of 2" in found.about["soft_cap"]
