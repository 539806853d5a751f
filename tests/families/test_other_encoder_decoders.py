"""What is special about encoder-decoders with decoders of other kinds; `test_encoder_decoders.py` has what all have."""

import copy
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, patching
from hooked_lm.components.stack_context import EncoderDecoderCache
from tests.close import assert_apart, assert_close
from tests.families import Case, reference
from tests.families._models import hooked
from tests.families.other_encoder_decoders import AS_IT_IS, CASES, PREDICTING

EVEN = next(case for case in CASES if case.family == "t5gemma2")
SOURCE, OTHER = torch.tensor([[5, 3, 7, 4, 2], [7, 7, 2, 8, 6]]), torch.tensor([[5, 8, 9, 4, 3], [7, 1, 2, 8, 9]])
TARGET = torch.tensor([[3, 7, 4], [3, 2, 2]])
WHOLE = pytest.mark.filterwarnings("ignore:.*whole forward pass")


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def assert_sweep_is_exact(case: Case, name: str, site: str, positions: int) -> None:
    """Each cell of a sweep over positions (of the first axis of them) is a forward pass with the value of the other run."""
    model = hooked(case)
    grid = patching.sweep(
        model, SOURCE, OTHER, metric=metric, decoder_input=TARGET, sites=name, positions="each", progress=False
    )
    logits, cache = model.run_with_cache(OTHER, TARGET)
    point = model.hook_dict[site.format(0)]
    axis = next(i for i, dim in enumerate(point.dims) if dim in ("pos", "query_pos") or (i == 1 and dim == "key_pos"))
    assert grid.values.shape[:-1].numel() == len(model.decoder) * positions
    for layer in range(len(model.decoder)):
        for pos in range(positions):
            where = (slice(None),) * axis + (pos,)

            def patch(value: Tensor, hook: Any, where: Any = where) -> Tensor:
                value[where] = cache[hook.name][where]
                return value

            expected = metric(model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(site.format(layer), patch)]))
            found = grid.values.reshape(len(model.decoder), positions, -1)[layer, pos]
            assert_close(found, expected, scale=logits)  # of which it is a difference
    assert grid.effects().mean.abs().max() > 1e-3


# ---- one softmax over own keys and the encoder's ---------------------------------------------------------------------

MERGED = {
    "decoder.pattern": ("decoder.{}.attn.hook_pattern", 3),
    "decoder.cross_attn.pattern": ("decoder.{}.cross_attn.hook_pattern", 3),
    "decoder.cross_attn.v": ("decoder.{}.cross_attn.hook_v", 5),
    "decoder.cross_attn.z": ("decoder.{}.cross_attn.hook_z", 3),
}


@WHOLE
@pytest.mark.parametrize("name", MERGED)
@torch.no_grad()
def test_sweeps_of_the_halves_of_a_merged_attention(name: str) -> None:
    assert_sweep_is_exact(EVEN, name, *MERGED[name])


@torch.no_grad()
def test_rows_of_both_halves_sum_to_one() -> None:
    _, cache = hooked(EVEN).run_with_cache(SOURCE, TARGET)
    own, of_source = cache["decoder.pattern", 1], cache["decoder.pattern", 1, "cross_attn"]
    assert (own.shape, of_source.shape) == ((2, 4, 3, 3), (2, 4, 3, 5))
    assert_close(own.sum(-1) + of_source.sum(-1), torch.ones(2, 4, 3))
    assert (of_source.sum(-1) > 0.05).any()


@torch.no_grad()
def test_a_hidden_source_leaves_own_keys() -> None:
    """Scores of minus infinity in the columns of the source: nothing of it reaches the logits."""
    model = hooked(EVEN)

    def hide(scores: Tensor, hook: Any) -> Tensor:
        return torch.full_like(scores, float("-inf"))

    hidden = [("decoder.*.cross_attn.hook_attn_scores", hide)]
    assert_close(
        model.run_with_hooks(SOURCE, TARGET, fwd_hooks=hidden), model.run_with_hooks(OTHER, TARGET, fwd_hooks=hidden)
    )
    assert_apart(model(SOURCE, TARGET), model(OTHER, TARGET))


@torch.no_grad()
def test_norms_are_not_folded_into_weights_that_read_the_source_too() -> None:
    theirs = copy.deepcopy(reference(EVEN))
    folded = HookedEncoderDecoder.from_pretrained("tiny", hf_model=theirs)
    assert_close(folded(SOURCE, TARGET).log_softmax(-1), hooked(EVEN)(SOURCE, TARGET).log_softmax(-1))


@torch.no_grad()
def test_weights_of_the_source_are_those_of_own_keys() -> None:
    model = copy.deepcopy(hooked(EVEN))
    assert torch.equal(model.cross_W_V[1], model.W_V[3])
    model.decoder[1].attn.W_V.zero_()
    _, cache = model.run_with_cache(SOURCE, TARGET)
    assert (cache["decoder.1.cross_attn.hook_v"] == 0).all()
    assert (cache["decoder.0.cross_attn.hook_v"] != 0).any()


@torch.no_grad()
def test_the_end_of_an_image_has_a_vector_of_its_own() -> None:
    model = hooked(EVEN)
    embed = model.embed
    assert torch.equal(embed(torch.tensor([[7]]))[0, 0], embed.w_replaced)
    assert_close(model.W_E * embed.cfg.scale, embed(torch.arange(61)[None])[0])
    assert torch.equal(model.W_U, embed.W_E.T)


# ---- streams that predict several tokens -----------------------------------------------------------------------------

STREAMS = {
    "decoder.streams_pre": ("decoder.{}.hook_streams_pre", 3),
    "decoder.v": ("decoder.{}.attn.hook_v", 3),
}


def of_family(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


@WHOLE
@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_sweeps_of_streams(name: str) -> None:
    assert_sweep_is_exact(of_family("prophetnet-two-streams"), name, *STREAMS[name])


@torch.no_grad()
def test_the_next_token_is_that_of_transformers_step_by_step() -> None:
    """Single tokens with a cache pass by what `corrected` corrects: then transformers gives the logits of our whole run."""
    case = of_family("prophetnet-two-streams")
    theirs, past, steps = copy.deepcopy(reference(case)), None, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PREDICTING, "get_predict_relative_pos_embeddings", AS_IT_IS)
        name = "cache" if "cache" in signature(theirs.forward).parameters else "past_key_values"  # before 5.24
        for pos in range(TARGET.shape[1]):
            found = theirs(SOURCE, decoder_input_ids=TARGET[:, pos : pos + 1], **{name: past}, use_cache=True)
            past = found.past_key_values
            steps.append(found.logits)
        whole = theirs(SOURCE, decoder_input_ids=TARGET).logits
    logits = hooked(case)(SOURCE, TARGET)
    assert_close(torch.cat(steps, 1), logits)
    assert_apart(whole, logits)


@torch.no_grad()
def test_every_stream_is_that_of_transformers() -> None:
    """Those that have no effect on the logits predict the token after the next, and the one after that."""
    case = of_family("prophetnet-three-streams-untied-relu")
    model = hooked(case)
    _, cache = model.run_with_cache(SOURCE, TARGET, names_filter="decoder.1.hook_streams_post")
    expected = reference(case)(SOURCE, decoder_input_ids=TARGET).logits_ngram
    for stream in (1, 2):
        found = model.unembed.unhooked(cache["decoder.1.hook_streams_post"][:, :, 1 + stream])
        assert_close(found, expected[:, stream - 1])


@torch.no_grad()
def test_streams_computed_together_are_those_computed_one_by_one() -> None:
    """A layer with a listener in one of its streams computes each alone, for padded sources too."""
    model, mask = hooked(of_family("prophetnet-three-streams-untied-relu")), torch.ones_like(SOURCE)
    mask[0, :2] = 0
    of_all = [f"decoder.{layer}.hook_streams_post" for layer in range(2)]
    _, together = model.run_with_cache(SOURCE, TARGET, names_filter=of_all, attention_mask=mask)
    for inside in ("decoder.0.predicting.2.mlp.hook_post", "decoder.1.cross_attn.hook_z"):
        _, alone = model.run_with_cache(SOURCE, TARGET, names_filter=[*of_all, inside], attention_mask=mask)
        for name in of_all:
            assert_close(alone[name], together[name])


@torch.no_grad()
def test_a_predicting_stream_sees_fewer_tokens() -> None:
    """Stream n what is n positions back and the first token, besides itself; rows sum to one with the own key."""
    model, target = hooked(of_family("prophetnet-three-streams-untied-relu")), torch.arange(3, 9)[None]
    _, cache = model.run_with_cache(SOURCE[:1], target)
    far = torch.arange(6)[:, None] - torch.arange(6)
    for stream in range(3):
        inside = f"decoder.0.predicting.{stream}.attn."
        pattern, own = cache[inside + "hook_pattern"][0], cache[inside + "hook_pattern_own"][0]
        visible = (far >= stream) | (torch.arange(6) == 0)
        assert torch.equal(pattern > 0, visible.expand_as(pattern))
        assert_close(pattern.sum(-1) + own[..., 0], torch.ones(8, 6))


@torch.no_grad()
def test_keys_and_values_of_the_source_are_computed_once_for_all_streams() -> None:
    """An edit in the main stream reaches the predicting ones, with a cache and without, and one in a stream stays there."""
    model = hooked(of_family("prophetnet-two-streams"))

    def zero(value: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(value)

    runs = {}
    for site in ("decoder.1.cross_attn.hook_v", "decoder.1.predicting.0.cross_attn.hook_v"):
        whole = model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(site, zero)])
        past = EncoderDecoderCache(2)
        with model.hooks([(site, zero)]):
            steps = [model(None if pos else SOURCE, TARGET[:, pos : pos + 1], past_kv_cache=past) for pos in range(3)]
        assert_close(torch.cat(steps, 1), whole)
        runs[site] = whole
    assert_close(*runs.values())
    assert_apart(runs["decoder.1.cross_attn.hook_v"], model(SOURCE, TARGET))


def test_streams_share_weights() -> None:
    model = hooked(of_family("prophetnet-two-streams"))
    layer = model.decoder[0]
    for stream in layer.predicting:
        assert stream.attn.W_Q is layer.attn.W_Q
        assert stream.cross_attn.W_K is layer.cross_attn.W_K
        assert stream.ln3.w is layer.ln3.w
    names = [name for name, _ in model.named_parameters()]
    assert not any("predicting" in name for name in names)


@torch.no_grad()
def test_positions_start_after_the_row_of_padding() -> None:
    """With another pad token transformers decodes with a cache at wrong distances (`get_main_relative_pos_embeddings`)."""
    case = of_family("prophetnet-one-stream-many-buckets")
    other = replace(case, name="pad", fields={**case.fields, "pad_token_id": 2})
    model = hooked(other)
    assert (model.cfg.n_ctx, model.tree.decoder.n_ctx) == (37, 36)
    assert_close(model(SOURCE, TARGET), reference(other)(SOURCE, decoder_input_ids=TARGET).logits)
    longest = torch.full((1, 36), 5)
    assert_close(model(longest, longest), reference(other)(longest, decoder_input_ids=longest).logits)
    with pytest.raises(ValueError, match="n_ctx of 36"):
        model(longest, torch.full((1, 37), 5))
