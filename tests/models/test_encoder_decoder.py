"""HookedEncoderDecoder: what goes in and out, what hooks of either side can do, padding, and generation."""

import copy
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedEncoderDecoder
from hooked_lm.components.stack_context import EncoderDecoderCache
from hooked_lm.hooks import HookPoint, UnknownSite
from hooked_lm.models.config.flat import HookedEncoderDecoderConfig, HookedTransformerConfig
from tests.close import assert_apart, assert_close
from tests.core import thinned

SIZES: dict[str, Any] = {"n_layers": 2, "n_decoder_layers": 3, "d_model": 16, "n_heads": 2, "n_ctx": 24, "d_vocab": 20}
SIZES |= {"act_fn": "relu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.5, "seed": 0}
SOURCE, TARGET = torch.tensor([[5, 3, 9, 4, 2], [7, 7, 2, 8, 6]]), torch.tensor([[0, 7, 4, 11], [0, 2, 2, 13]])


@pytest.fixture(scope="module")
def model() -> HookedEncoderDecoder:
    """One that heeds its source."""
    model = HookedEncoderDecoder({**SIZES, "tie_word_embeddings": False})
    with torch.no_grad():
        for block in model.decoder:
            block.cross_attn.W_O.mul_(5.0)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<unk>", *["the", "cat", "sat", "on", "a", "mat", "and", "it", "ran", "to", "him"]]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    vocabulary.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


# ---- in and out ------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_decoders_positions(model: HookedEncoderDecoder):
    assert model(SOURCE, TARGET).shape == (2, 4, 20)
    assert_close(model(SOURCE[0], TARGET[0]), model(SOURCE[:1], TARGET[:1]))


def test_without_a_target_the_start_token_is_read(model: HookedEncoderDecoder):
    assert_close(model(SOURCE), model(SOURCE, torch.zeros(2, 1, dtype=torch.long)))


def test_loss_is_that_of_the_targets_next_tokens(model: HookedEncoderDecoder):
    logits, loss = model(SOURCE, TARGET, return_type="both")
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten())
    assert_close(loss, expected)
    assert_close(model(SOURCE, TARGET, return_type="loss"), expected)
    assert_close(model(SOURCE, TARGET, return_type="loss", loss_per_token=True).mean(), expected)
    assert model(SOURCE, TARGET, return_type=None) is None


def test_loss_leaves_padding_of_the_target_out(model: HookedEncoderDecoder):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    each = model(SOURCE, TARGET, "loss", loss_per_token=True, decoder_attention_mask=mask)
    assert (each == 0).tolist() == [[False, False, True], [False, False, False]]
    assert_close(model(SOURCE, TARGET, "loss", decoder_attention_mask=mask), each.sum() / 5)


def test_only_the_last_logits_on_demand(model: HookedEncoderDecoder):
    assert_close(model(SOURCE, TARGET, logits_to_keep=1), model(SOURCE, TARGET)[:, -1:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input": torch.ones(1, 25, dtype=torch.long)}, "n_ctx of 24"),
        ({"input": SOURCE, "decoder_input": torch.ones(2, 25, dtype=torch.long)}, "n_ctx of 24"),
        ({"input": SOURCE + 15}, "d_vocab is 20"),
        ({"input": SOURCE, "decoder_input": TARGET - 21}, "d_vocab is 20"),
        ({"input": SOURCE, "decoder_input": TARGET[:1]}, "2 rows, and the decoder's input 1"),
        ({"input": SOURCE, "attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "row 1 is all padding"),
        ({"input": SOURCE, "attention_mask": SOURCE, "one_zero_attention_mask": SOURCE}, "are synonyms"),
        ({"input": SOURCE, "return_type": "logit"}, "return_type must be"),
        ({"input": SOURCE, "decoder_input": TARGET, "return_type": "loss", "logits_to_keep": 1}, "all positions"),
        ({"input": None}, "no input for the encoder"),
        ({"input": "the cat"}, "text needs a tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused(model: HookedEncoderDecoder, arguments: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        model(**arguments)


def test_ids_are_integers(model: HookedEncoderDecoder):
    for wrong in (SOURCE.float(), SOURCE[None]):
        with pytest.raises(ValueError, match="token ids must be integers"):
            model._source_tokens(wrong, None)


@torch.no_grad()
def test_masks_are_as_long_as_the_ids(model: HookedEncoderDecoder):
    with pytest.raises(ValueError, match=r"is \(2, 3\); expected \(2, 4\)"):
        model(SOURCE, TARGET, decoder_attention_mask=torch.ones(2, 3, dtype=torch.long))
    cache = EncoderDecoderCache(3)
    model(SOURCE, TARGET[:, :3], past_kv_cache=cache)
    whole = model(None, TARGET[:, 3:], decoder_attention_mask=torch.ones(2, 4, dtype=torch.long), past_kv_cache=cache)
    assert_close(whole, model(SOURCE, TARGET)[:, 3:])


def test_a_start_token_must_be_known():
    model = HookedEncoderDecoder({**SIZES, "decoder_start_token_id": None})
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model(SOURCE)
    assert model(SOURCE, TARGET).shape == (2, 4, 20)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def others_and_copies(model: HookedEncoderDecoder) -> tuple[list[str], list[str]]:
    """The sites, and those of copies of the stream, which pass the norm's sites too where these do more than record."""
    copies = [name for name in model.all_points() if name.endswith(("_input", "hook_attn_in"))]
    return [name for name in model.all_points() if name not in copies], copies


def test_every_site_fires_once_in_the_order_of_computation(model: HookedEncoderDecoder):
    fired: list[str] = []
    for names in others_and_copies(model):
        fired.clear()
        model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(names, lambda value, hook: fired.append(hook.name))])
        assert fired == names
    _, cache = model.run_with_cache(SOURCE, TARGET, names_filter="*")
    assert list(cache) == list(model.all_points())


def test_sites_of_the_decoder_are_over_both_kinds_of_positions(model: HookedEncoderDecoder):
    _, cache = model.run_with_cache(SOURCE, TARGET)
    assert cache["encoder.1.attn.hook_pattern"].shape == (2, 2, 5, 5)
    assert cache["decoder.2.attn.hook_pattern"].shape == (2, 2, 4, 4)
    assert cache["decoder.2.cross_attn.hook_pattern"].shape == (2, 2, 4, 5)
    assert cache["decoder.0.cross_attn.hook_q"].shape == (2, 4, 2, 8)
    assert cache["decoder.0.cross_attn.hook_k"].shape == (2, 5, 2, 8)
    assert cache["encoder_rel_pos_bias.hook_bias"].shape == (2, 2, 5, 5)
    assert cache["decoder_rel_pos_bias.hook_bias"].shape == (2, 2, 4, 4)
    assert cache["hook_encoder_out"].shape == (2, 5, 16)


def test_positions_are_sliced_on_their_own_axis(model: HookedEncoderDecoder):
    _, cache = model.run_with_cache(SOURCE, TARGET, pos_slice=-1)
    assert cache["decoder.0.cross_attn.hook_pattern"].shape == (2, 2, 1, 5)
    assert cache["decoder.0.cross_attn.hook_k"].shape == (2, 5, 2, 8)
    assert cache["decoder.0.hook_resid_pre"].shape == (2, 1, 16)


def test_short_names(model: HookedEncoderDecoder):
    _, cache = model.run_with_cache(SOURCE, TARGET)
    assert cache["decoder.z", -1] is cache["decoder.2.attn.hook_z"]
    assert cache["decoder.pattern", 0, "cross_attn"] is cache["decoder.0.cross_attn.hook_pattern"]
    assert cache["encoder.resid_post", -1] is cache["encoder.1.hook_resid_post"]
    assert cache["decoder.scale", 1, "ln3"] is cache["decoder.1.ln3.hook_scale"]
    one_row = cache.apply_slice_to_batch_dim(0)
    assert one_row["encoder.pre", 0].shape == (5, 64)
    with pytest.raises(IndexError, match="encoder layer 2"):
        cache["encoder.z", 2]
    with pytest.raises(KeyError, match="begins with its side"):
        cache["z", 0]
    with pytest.raises(UnknownSite, match=r"decoder\.0\.cross_attn\.hook_z"):
        model.run_with_cache(SOURCE, TARGET, names_filter="decoder.0.cros_attn.hook_z")


def test_a_decoder_that_does_not_read_its_source_does_not_depend_on_it(model: HookedEncoderDecoder):
    hooks = [("decoder.*.cross_attn.hook_z", lambda z, hook: torch.zeros_like(z))]
    blind = model.run_with_hooks(SOURCE, TARGET, fwd_hooks=hooks)
    assert_close(blind, model.run_with_hooks(SOURCE.flip(1), TARGET, fwd_hooks=hooks))
    assert_apart(blind, model(SOURCE, TARGET))
    assert_apart(model(SOURCE, TARGET), model(SOURCE.flip(1), TARGET))


def test_the_encoders_output_carries_all_of_the_source(model: HookedEncoderDecoder):
    other = model.encode(SOURCE.flip(0))
    patched = model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[("hook_encoder_out", lambda out, hook: other)])
    assert_close(patched, model(SOURCE.flip(0), TARGET))


def test_one_cross_pattern_decides_what_one_layer_reads(model: HookedEncoderDecoder):
    def only_first(pattern: Tensor, hook: HookPoint) -> Tensor:
        return F.one_hot(torch.zeros_like(pattern[..., 0]).long(), 5).to(pattern)

    site = "decoder.1.cross_attn.hook_pattern"
    with model.hooks([(site, only_first)]):
        _, cache = model.run_with_cache(SOURCE, TARGET)
    first = cache["decoder.1.cross_attn.hook_v"][:, :1].expand(-1, 4, -1, -1)
    assert_close(cache["decoder.1.cross_attn.hook_z"], first)


def test_the_encoder_sees_ahead_and_the_decoder_does_not(model: HookedEncoderDecoder):
    _, cache = model.run_with_cache(SOURCE, TARGET)
    assert (cache["encoder.0.attn.hook_pattern"] > 0).all()
    assert (cache["decoder.0.attn.hook_pattern"].triu(1) == 0).all()
    changed = TARGET.clone()
    changed[:, -1] = 19
    assert_close(model(SOURCE, changed)[:, :-1], model(SOURCE, TARGET)[:, :-1])


@pytest.mark.parametrize("site", ["encoder_rel_pos_bias.hook_bias", "decoder_rel_pos_bias.hook_bias"])
def test_a_shared_bias_is_edited_for_all_layers_and_both_paths(model: HookedEncoderDecoder, site: str):
    def edit(bias: Tensor, hook: HookPoint) -> Tensor:
        return bias + torch.linspace(0, 3, bias.shape[-1])

    clean, edited = model(SOURCE, TARGET), model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(site, edit)])
    assert_apart(edited, clean)
    with model.hooks([(site, edit)]):
        in_steps, _ = model.run_with_cache(SOURCE, TARGET)
    assert_close(in_steps, edited)


def test_gradients_reach_both_sides(model: HookedEncoderDecoder):
    _, cache = model.run_with_cache(SOURCE, TARGET, return_type="loss", incl_bwd=True)
    model.zero_grad()
    for site in ("encoder.0.hook_resid_pre", "decoder.0.hook_resid_pre", "decoder.2.cross_attn.hook_pattern"):
        assert cache[site + "_grad"].abs().max() > 0
    assert cache["decoder.z_grad", 0].shape == (2, 4, 2, 8)


def test_copies_of_the_stream_are_edited_apart(model: HookedEncoderDecoder):
    def zero(value: Tensor, hook: HookPoint) -> Tensor:
        return torch.zeros_like(value)

    _, clean = model.run_with_cache(SOURCE, TARGET)
    with model.hooks([("decoder.1.hook_cross_attn_in", zero)]):
        _, cache = model.run_with_cache(SOURCE, TARGET)
    assert_close(cache["decoder.1.hook_resid_mid"], clean["decoder.1.hook_resid_mid"])
    assert (cache["decoder.1.cross_attn.hook_q"] == 0).all()
    assert_close(
        cache["decoder.1.hook_resid_mid_cross"] - cache["decoder.1.hook_resid_mid"],
        cache["decoder.1.hook_cross_attn_out"],
    )


def test_other_threads_do_not_see_hooks(model: HookedEncoderDecoder):
    clean, found = model(SOURCE, TARGET), []
    with model.hooks([("decoder.*.cross_attn.hook_z", lambda z, hook: z * 0)]):
        thread = threading.Thread(target=lambda: found.append(model(SOURCE, TARGET)))
        thread.start()
        thread.join()
    assert_close(found[0], clean)


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(model: HookedEncoderDecoder, side: str, listening: bool):
    """Padding of the source, in the encoder and for cross attention, and of the target."""
    source, mask = padded([SOURCE[0], SOURCE[1, :3]], side)
    target, target_mask = padded([TARGET[0, :2], TARGET[1]], side)
    run = model.run_with_cache if listening else model
    found = run(source, target, attention_mask=mask, decoder_attention_mask=target_mask)
    logits = found[0] if listening else found
    assert_close(logits[0][target_mask[0].bool()], model(SOURCE[:1], TARGET[:1, :2])[0])
    assert_close(logits[1][target_mask[1].bool()], model(SOURCE[1:, :3], TARGET[1:])[0])
    assert_close(logits, model(source, target, "logits", mask, decoder_attention_mask=target_mask))


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    tokens, mask = torch.full((len(rows), longest), 17), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(longest - len(row), None) if side == "left" else slice(len(row))
        tokens[i, span], mask[i, span] = row, 1
    return tokens, mask


# ---- generation ------------------------------------------------------------------------------------------------------


def generated(model: HookedEncoderDecoder, source: Any = SOURCE, n: int = 12, **options: Any) -> Any:
    return model.generate(
        source, max_new_tokens=n, verbose=False, **{"stop_at_eos": False, "do_sample": False, **options}
    )


@torch.no_grad()
def test_generation_with_and_without_a_cache_is_a_loop_over_the_forward_pass(model: HookedEncoderDecoder):
    target = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(12):
        target = torch.cat([target, model(SOURCE, target)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated(model), target)
    assert torch.equal(generated(model, use_past_kv_cache=False), target)
    assert len({tuple(row) for row in target.tolist()}) == 2, "two sources with one translation show little"


@pytest.mark.slow
def test_generation_pads_sources_that_are_given_together(model: HookedEncoderDecoder):
    source, mask = padded([SOURCE[0], SOURCE[1, :3]], "right")
    found = generated(model, source, attention_mask=mask)
    assert torch.equal(found[1:], generated(model, SOURCE[1:, :3]))
    assert torch.equal(found[:1], generated(model, SOURCE[:1]))
    assert torch.equal(found, generated(model, source, one_zero_attention_mask=mask, use_past_kv_cache=False))


def test_a_source_is_read_once(model: HookedEncoderDecoder):
    fired: Counter[str] = Counter()
    for names in others_and_copies(model):
        with model.hooks([(names, lambda value, hook: fired.update([hook.name]))]):
            generated(model, n=6)
    assert {fired[name] for name in model.all_points() if name.startswith("encoder")} == {1}
    assert fired["decoder.0.cross_attn.hook_k"] == fired["decoder.0.cross_attn.hook_v"] == 1
    assert fired["decoder.0.cross_attn.hook_q"] == fired["decoder.0.attn.hook_k"] == 6


def test_hooks_act_in_generation(model: HookedEncoderDecoder):
    def swap(out: Tensor, hook: HookPoint) -> Tensor:
        return out.flip(0)

    with model.hooks([("hook_encoder_out", swap)]):
        found = generated(model)
    assert torch.equal(found, generated(model, SOURCE.flip(0)))


def test_rows_end_at_eos_and_are_filled_with_padding(model: HookedEncoderDecoder):
    free = generated(model)
    end = int(free[0, 3])
    found = generated(model, stop_at_eos=True, eos_token_id=end)
    for row, whole in zip(found, free, strict=True):
        ends = (whole[1:] == end).nonzero()
        length = int(ends[0]) + 2 if len(ends) else found.shape[1]
        assert torch.equal(row[:length], whole[:length])
        assert (row[length:] == 0).all()
    single = generated(model, SOURCE[:1], stop_at_eos=True, eos_token_id=end)
    assert single.shape[1] <= 4
    assert int(single[0, -1]) == end


def test_a_target_may_be_begun(model: HookedEncoderDecoder):
    free = generated(model)
    assert torch.equal(generated(model, n=8, decoder_input=free[:, :5]), free)


@pytest.mark.slow
def test_a_first_token_is_forced_and_others_are_suppressed(model: HookedEncoderDecoder):
    forced = generated(model, forced_bos_token_id=13)
    assert (forced[:, 1] == 13).all()
    assert torch.equal(forced, generated(model, n=11, decoder_input=torch.tensor([[0, 13]] * 2)))
    banned = forced[0, 2:].unique().tolist()
    assert not torch.isin(generated(model, suppress_tokens=banned), torch.tensor(banned)).any()


@pytest.mark.slow
def test_sampling_follows_its_seed(model: HookedEncoderDecoder):
    state = torch.get_rng_state()
    drawn = [generated(model, do_sample=True, temperature=2.0, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generated(model, do_sample=True, top_k=1), generated(model))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 24}, "0 to 23"),
        ({"return_type": "logits"}, "return_type must be"),
        ({"top_k": 0}, "top_k"),
        ({"eos_token_id": 40, "stop_at_eos": True}, "out of range"),
        ({"decoder_input": TARGET[:1]}, "as many rows"),
        ({"attention_mask": SOURCE, "one_zero_attention_mask": SOURCE}, "are synonyms"),
    ],
)
def test_generation_refuses_what_makes_no_sense(model: HookedEncoderDecoder, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        generated(model, **options)


@torch.no_grad()
def test_a_cache_by_hand(model: HookedEncoderDecoder):
    cache = EncoderDecoderCache.init_cache(model.cfg)
    first = model(SOURCE, TARGET[:, :3], past_kv_cache=cache)
    last = model(None, TARGET[:, 3:], past_kv_cache=cache)
    assert_close(torch.cat([first, last], 1), model(SOURCE, TARGET))
    with pytest.raises(ValueError, match="give input=None"):
        model(SOURCE, TARGET[:, :1], past_kv_cache=cache)


@torch.no_grad()
def test_a_run_that_fails_leaves_the_cache_as_it_was(model: HookedEncoderDecoder):
    def fail(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError("on purpose")

    cache = EncoderDecoderCache(3)
    with pytest.raises(RuntimeError, match="on purpose"):
        model.run_with_hooks(SOURCE, TARGET, past_kv_cache=cache, fwd_hooks=[("decoder.2.hook_mlp_out", fail)])
    assert cache.length == 0
    assert cache.source is None
    assert_close(model(SOURCE, TARGET, past_kv_cache=cache), model(SOURCE, TARGET))


@torch.no_grad()
def test_a_frozen_cache_is_only_read(model: HookedEncoderDecoder):
    cache = EncoderDecoderCache(3)
    model(SOURCE, TARGET[:, :2], past_kv_cache=cache)
    cache.freeze()
    for _ in range(2):
        assert_close(model(None, TARGET[:, 2:], past_kv_cache=cache), model(SOURCE, TARGET)[:, 2:])
    assert cache.length == 2


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(model: HookedEncoderDecoder, tokenizer: Any) -> HookedEncoderDecoder:
    reader = copy.deepcopy(model)
    reader.set_tokenizer(tokenizer)
    return reader


def test_text_has_the_tokenizers_special_tokens_and_a_mask(reader: HookedEncoderDecoder):
    tokens, mask = reader.to_tokens(["the cat sat", "it ran to him and sat"])
    assert tokens.tolist() == [[3, 4, 5, 1, 0, 0, 0], [10, 11, 12, 13, 9, 5, 1]]
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1] * 7]
    assert reader.to_str_tokens("the cat") == ["the", "cat", "</s>"]
    assert reader.to_string(tokens[0, :2]) == "the cat"
    assert reader.to_single_token("mat") == 8
    assert reader.to_single_str_token(8) == "mat"


def test_text_that_is_cut_keeps_its_end(reader: HookedEncoderDecoder):
    tokens, _ = reader.to_tokens("cat " * 50)
    assert tokens.shape == (1, 24)
    assert tokens[0, -1] == 1
    with pytest.raises(ValueError, match="n_ctx of 24"):
        reader("cat " * 50)


def test_text_and_ids_give_the_same_logits(reader: HookedEncoderDecoder):
    logits = reader(["the cat sat", "it ran to him and sat"], ["the mat", "him"])
    assert_close(logits[:1], reader(torch.tensor([[3, 4, 5, 1]]), torch.tensor([[0, 3, 8, 1]])))
    assert_close(logits[1:, :3], reader(torch.tensor([[10, 11, 12, 13, 9, 5, 1]]), torch.tensor([[0, 13, 1]])))


def test_text_becomes_text(reader: HookedEncoderDecoder):
    ids = generated(reader, torch.tensor([[3, 4, 5, 1]]), suppress_tokens=range(14, 20))
    text = generated(reader, "the cat sat", suppress_tokens=range(14, 20))
    assert text == reader.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert generated(reader, ["the cat sat"], suppress_tokens=range(14, 20)) == [text]
    assert torch.equal(generated(reader, "the cat sat", return_type="tokens", suppress_tokens=range(14, 20)), ids)


def test_targets_of_a_tokenizer_with_two_vocabularies(model: HookedEncoderDecoder):
    class TwoVocabularies:
        pad_token_id, eos_token_id, bos_token_id = 0, 1, None

        def decode(self, ids: list[int], **options: Any) -> str:
            return " ".join(map(str, ids))

        def __call__(self, texts: Any = None, text_target: Any = None, **options: Any) -> dict[str, list[list[int]]]:
            assert options.pop("verbose") is False
            end = [1] if options["add_special_tokens"] else []
            return {"input_ids": [[15] * len(text.split()) + end for text in text_target or texts]}

    reader = copy.deepcopy(model)
    reader.set_tokenizer(TwoVocabularies())
    reader.cfg.forced_bos_token_id = 18
    assert reader.to_decoder_tokens(["the cat", "it"])[0].tolist() == [[0, 18, 15, 15, 1], [0, 18, 15, 1, 0]]


# ---- config and weights ----------------------------------------------------------------------------------------------


def test_the_flat_config_and_its_tree_say_the_same():
    cfg = HookedEncoderDecoderConfig(**SIZES)
    again = HookedEncoderDecoderConfig.from_tree(cfg.tree)
    for name in (
        "n_layers",
        "n_decoder_layers",
        "d_model",
        "n_heads",
        "d_head",
        "d_mlp",
        "n_ctx",
        "d_vocab",
        "n_params",
    ):
        assert getattr(again, name) == getattr(cfg, name), name
    assert again.relative_attention_num_buckets == 8
    assert again.positional_embedding_type == "relative_positional_bias"
    assert again.n_params == 2 * (4 * 16 * 16 + 2 * 16 * 64) + 3 * (8 * 16 * 16 + 2 * 16 * 64)


def test_a_gated_model_from_flat_names():
    model = HookedEncoderDecoder({**SIZES, "gated_mlp": True, "d_mlp": 24, "d_head": 6})
    assert model.W_gate.shape == (5, 16, 24)
    assert model.cfg.gated_mlp
    assert model.verify().ok


@pytest.mark.parametrize(
    "changes", [{"normalization_type": "LN"}, {"positional_embedding_type": "standard"}, {"d_vocab": -1}]
)
def test_flat_names_refuse_what_they_cannot_build(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=r"flat names build|d_vocab is missing"):
        HookedEncoderDecoder(HookedEncoderDecoderConfig(**{**SIZES, **changes}))


def test_a_decoders_config_is_refused():
    flat = HookedTransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=8, d_vocab=8, act_fn="relu")
    with pytest.raises(TypeError, match="HookedTransformerConfig"):
        HookedEncoderDecoder(flat)


COMPILE = """
import torch
from tests.close import assert_close
from hooked_lm import HookedEncoderDecoder
model = HookedEncoderDecoder(dict(n_layers=1, d_model=8, n_heads=2, n_ctx=9, d_vocab=7, act_fn="relu", seed=0))
compiled = torch.compile(model, fullgraph=True, backend="eager")
for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
    inputs = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[0, 2], [0, 4]])
    assert_close(compiled(*inputs, attention_mask=mask), model(*inputs, attention_mask=mask))
print("compiled")
"""


@pytest.mark.slow
def test_compilation_in_one_graph():
    """In a separate process, because the runtime checks of annotations, which only tests have, do not compile."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr


def test_a_size_that_is_assigned_is_that_of_the_model():
    cfg = HookedEncoderDecoderConfig(**SIZES)
    cfg.n_decoder_layers = 1
    assert len(HookedEncoderDecoder(cfg).decoder) == 1


def test_views_of_the_weights(model: HookedEncoderDecoder):
    assert model.W_Q.shape == model.W_K.shape == (5, 2, 16, 8)
    assert model.W_in.shape == (5, 16, 64)
    assert model.b_in.shape == (5, 64)
    assert torch.equal(model.W_O[2], model.decoder[0].attn.W_O)
    assert torch.equal(model.cross_W_V[1], model.decoder[1].cross_attn.W_V)
    assert model.cross_W_Q.shape == model.cross_W_K.shape == (3, 2, 16, 8)
    assert model.cross_W_O.shape == (3, 2, 8, 16)
    assert model.W_E.shape == (20, 16)
    assert model.W_U.shape == (16, 20)
    labels = model.all_head_labels()
    assert len(labels) == 10
    assert labels[0] == "EL0H0"
    assert labels[-1] == "DL2H1"


def test_views_of_sides_that_differ(model: HookedEncoderDecoder):
    narrow = copy.deepcopy(model.cfg.tree)
    blocks = tuple(replace(block, mlp=replace(block.mlp, d_mlp=12)) for block in narrow.decoder.blocks)
    tree = replace(narrow, decoder=replace(narrow.decoder, blocks=blocks))
    other = HookedEncoderDecoder(HookedEncoderDecoderConfig.from_tree(tree, device="cpu"))
    assert other.W_Q.shape == (5, 2, 16, 8)
    with pytest.raises(ValueError, match="cannot be stacked"):
        _ = other.W_in
    with pytest.raises(AttributeError, match="W_pos"):
        _ = other.W_pos
    for two_streams in (lambda: other.accumulated_bias(1), lambda: other.all_composition_scores("Q")):
        with pytest.raises(ValueError, match="two residual streams"):
            two_streams()


def test_weights_travel_in_a_state_dict(model: HookedEncoderDecoder):
    other = HookedEncoderDecoder({**SIZES, "seed": 1, "tie_word_embeddings": False})
    assert_apart(other(SOURCE, TARGET), model(SOURCE, TARGET))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(SOURCE, TARGET), model(SOURCE, TARGET))


def test_a_tied_unembedding_is_one_parameter_with_the_embedding():
    model = HookedEncoderDecoder(SIZES)
    assert model.unembed.W_U.data_ptr() == model.embed.W_E.data_ptr()
    assert "unembed.W_U" not in dict(model.named_parameters())
    other = HookedEncoderDecoder({**SIZES, "seed": 1})
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(SOURCE, TARGET), model(SOURCE, TARGET))


def test_embeddings_of_either_side():
    tree = HookedEncoderDecoderConfig(**SIZES).tree
    decoder_embed, unembed = replace(tree.embed, d_vocab=11), replace(tree.unembed, d_vocab=11)
    tree = replace(tree, decoder_embed=decoder_embed, unembed=unembed)
    model = HookedEncoderDecoder(HookedEncoderDecoderConfig.from_tree(tree, device="cpu", seed=2))
    assert model(SOURCE, TARGET.clamp(max=10)).shape == (2, 4, 11)
    assert model.unembed.W_U.data_ptr() == model.decoder_embed.W_E.data_ptr()
    with pytest.raises(ValueError, match="d_vocab is 11"):
        model(SOURCE, TARGET)
    other = HookedEncoderDecoder(HookedEncoderDecoderConfig.from_tree(tree, device="cpu", seed=3))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.unembed.W_U, model.unembed.W_U)


def test_precision_follows_the_model(model: HookedEncoderDecoder):
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.cfg.dtype == torch.bfloat16
    logits, _ = half.run_with_cache(SOURCE, TARGET)
    assert logits.dtype == torch.bfloat16
    assert_close(logits, model(SOURCE, TARGET), dtype=torch.bfloat16)
    whole_runs = "output == output with sites on demand"  # two paths through all layers, each with its own rounding
    assert set(half.verify(SOURCE, TARGET).failed) <= {whole_runs}


# ---- identities ------------------------------------------------------------------------------------------------------


def test_identities(model: HookedEncoderDecoder):
    report = model.verify(SOURCE, TARGET)
    assert report.ok, str(report)
    names = [check.name for check in report.checks]
    for part in (
        "cross_attn: q k^T",
        "resid_mid + cross_attn_out == resid_mid_cross",
        "encoder_final_ln(resid_post)",
    ):
        assert any(part in name for name in names), part


def add_more_than_is_shown(model: Any) -> str:
    block = model.decoder[1]
    shown = block.apply_cross_attn
    block.apply_cross_attn = lambda *inputs: 2 * shown(*inputs)
    return "decoder: resid_mid + cross_attn_out == resid_mid_cross"


def read_another_source(model: Any) -> str:
    attn = model.decoder[0].cross_attn
    made = attn.keys_values
    attn.keys_values = lambda source: made(type(source)(source.resid * 0.5, source.real))
    return "decoder: cross_attn: input of cross attention -> k"


def scale_twice(model: Any) -> str:
    attn = model.decoder[2].cross_attn
    mix = attn.mix
    attn.mix = lambda q, k, v, *context_and_layer: mix(q * 2, k, v, *context_and_layer)
    return "decoder: cross_attn: q k^T * scale, capped == attn_scores"


def skip_the_final_norm(model: Any) -> str:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model.hook_encoder_out = nn.Sequential(Nothing(), model.hook_encoder_out)
    return "encoder_final_ln(resid_post) == encoder_out"


DAMAGES = [add_more_than_is_shown, read_another_source, scale_twice, skip_the_final_norm]


@pytest.mark.parametrize("damage", thinned(DAMAGES, keep=[read_another_source]))
def test_identities_notice_a_site_that_lies(model: HookedEncoderDecoder, damage: Any):
    damaged = copy.deepcopy(model)
    name = damage(damaged)
    assert name in damaged.verify(SOURCE, TARGET).failed


def test_flags_of_a_bare_cache(model: HookedEncoderDecoder):
    """A flag adds its sites of all three kinds of attention, and nothing else."""
    _, plain = model.run_with_cache(SOURCE, TARGET)
    _, cache = HookedEncoderDecoder({**SIZES, "use_attn_result": True}).run_with_cache(SOURCE, TARGET)
    parts = [f"encoder.{i}.attn" for i in range(2)]
    parts += [f"decoder.{i}.{kind}" for i in range(3) for kind in ("attn", "cross_attn")]
    assert set(cache) - set(plain) == {f"{part}.hook_result" for part in parts}
    assert cache["decoder.1.cross_attn.hook_result"].shape == (2, 4, 2, 16)


@pytest.mark.parametrize("site", ["encoder.1.hook_mlp_out", "decoder.0.hook_cross_attn_out"])
def test_a_point_can_be_replaced(model: HookedEncoderDecoder, site: str):
    changed = copy.deepcopy(model)
    parent, _, leaf = site.rpartition(".")
    setattr(changed.get_submodule(parent), leaf, nn.Dropout(1.0))
    changed.setup()
    zeroed = model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(site, lambda x, hook: x * 0)])
    assert_close(changed(SOURCE, TARGET), zeroed)
