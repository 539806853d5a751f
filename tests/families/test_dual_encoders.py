"""What every pair of towers of `tests/families/` buys: the numbers of transformers, under names that mean what they say."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedDualEncoder, HookedDualEncoderConfig
from tests.close import GRADIENT, assert_close
from tests.families import Case, reference
from tests.families._alive import without_effect
from tests.families._models import (
    MODERATE,
    assert_as_near_the_truth,
    assert_same_files,
    assert_same_gradients_of,
    assert_same_tensors,
    backpropagate,
    judged_on_more_where_few_decide,
)
from tests.families._vision import hooked_pair, pair_inputs, theirs
from tests.families.dual_encoders import CASES
from tests.unchecked import unchecked

EACH_CASE = CASES


@torch.no_grad()
def test_outputs(case: Case):
    inputs, model = pair_inputs(case), hooked_pair(case)
    expected = theirs(case)(**inputs)
    deviation = expected.logits_per_image.std()
    assert MODERATE[0] < deviation < MODERATE[1], f"the deviation of the logits is {deviation:.2g}"
    for name in ("logits_per_image", "logits_per_text", "image_embeds", "text_embeds"):
        assert_close(model(**inputs, return_type=name), expected[name])
    assert_close(model(**inputs), expected.logits_per_image)
    assert model(**inputs, return_type=None) is None


@torch.no_grad()
def test_padding(case: Case):
    """With a mask, on the right and on the left, where positions count padding too."""
    inputs, model = pair_inputs(case, 2), hooked_pair(case)
    for ends in (slice(-2, None), slice(0, 2)):
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, ends] = inputs["input_ids"][0, ends] = 0
        expected = theirs(case)(**inputs, attention_mask=mask).logits_per_image
        assert_close(model(**inputs, attention_mask=mask), expected)


@torch.no_grad()
def test_one_side_alone(case: Case):
    inputs, model = pair_inputs(case), hooked_pair(case)
    expected = theirs(case)(**inputs)
    assert_close(model.encode_image(inputs["pixel_values"]), expected.image_embeds)
    assert_close(model.encode_text(inputs["input_ids"]), expected.text_embeds)
    assert_close(model.encode_image(inputs["pixel_values"][0]), expected.image_embeds[:1])
    assert_close(model.encode_text(inputs["input_ids"][0]), expected.text_embeds[:1])
    _, cache = model.run_with_cache(pixel_values=inputs["pixel_values"], return_type="image_embeds")
    assert "vision.blocks.0.hook_resid_pre" in cache
    assert not any(name.startswith("text.") for name in cache)
    features = theirs(case).get_image_features(inputs["pixel_values"]).pooler_output
    assert_close(cache["hook_image_features"], features)
    with pytest.raises(ValueError, match="the images are missing; encode_image"):
        model(inputs["input_ids"])


@torch.no_grad()
def test_the_streams_are_those_of_transformers(case: Case):
    """The hidden states of transformers are the stream before each block."""
    inputs, model = pair_inputs(case), hooked_pair(case)
    _, cache = model.run_with_cache(**inputs)
    expected = theirs(case)(**inputs, output_hidden_states=True)
    sides = {"vision": expected.vision_model_output, "text": expected.text_model_output}
    for side, output in sides.items():
        for layer in range(len(getattr(model, side).blocks)):
            assert_close(cache[f"{side}.resid_pre", layer], output.hidden_states[layer])


@unchecked()
def test_gradients(case: Case):
    """For every weight, under the name that transformers gives it, and for the pixels."""
    of_pixels = dict[str, list[Tensor]](ours=[], theirs=[])

    def run(model: Any, dtype: torch.dtype, whose: str) -> Any:
        inputs = pair_inputs(case, dtype=dtype)
        inputs["pixel_values"].requires_grad_()
        found = model(**inputs)
        backpropagate(found if isinstance(found, Tensor) else found.logits_per_image)
        of_pixels[whose].append(inputs["pixel_values"].grad)
        return model

    assert_same_gradients_of(
        lambda dtype: run(copy.deepcopy(hooked_pair(case)).to(dtype), dtype, "ours"),
        lambda dtype: run(theirs(case, dtype), dtype, "theirs"),
    )
    assert_close(of_pixels["ours"][0], of_pixels["theirs"][0], GRADIENT)


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    ours = copy.deepcopy(hooked_pair(case)).to(torch.bfloat16)

    def compare(n_pairs: int) -> None:
        exact, inputs = (pair_inputs(case, n_pairs, dtype) for dtype in (torch.float64, torch.bfloat16))
        truth = theirs(case, torch.float64)(**exact).logits_per_image
        rough = theirs(case, torch.bfloat16)(**inputs).logits_per_image
        assert_as_near_the_truth(ours(**inputs), rough, truth, routed=False)

    judged_on_more_where_few_decide(compare, 48)


# ---- the way in and out ----------------------------------------------------------------------------------------------


@unchecked()
def test_tensors_may_come_in_any_order(case: Case, read: HookedDualEncoder):
    assert type(read) is HookedDualEncoder
    assert_same_tensors(dict(read.named_parameters()), dict(hooked_pair(case).named_parameters()))


@unchecked()
def test_export_is_exact(read: HookedDualEncoder, checkpoint: Path, tensors: dict[str, Tensor], tmp_path: Path):
    read.save_pretrained(tmp_path)
    assert_same_files(tmp_path, checkpoint, tensors)


@torch.no_grad()
@unchecked()
def test_the_model_of_transformers_comes_back(case: Case):
    back, inputs = hooked_pair(case).to_hf(), pair_inputs(case)
    assert type(back) is type(reference(case))
    assert_same_tensors(back.state_dict(), reference(case).state_dict())
    assert_close(back(**inputs).logits_per_image, theirs(case)(**inputs).logits_per_image)


# ---- sites -----------------------------------------------------------------------------------------------------------


@unchecked()
def test_identities(case: Case):
    report = hooked_pair(case).verify()
    assert report.ok, str(report)


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: Case):
    """An edit of any site changes the output."""
    model, inputs = hooked_pair(case), pair_inputs(case)
    d_vocab = model.cfg.d_vocab
    end = getattr(model.tree.text.pooler, "end", None)

    def bend(value: Tensor, hook: Any) -> Tensor:
        if not value.is_floating_point():
            return torch.where(value == end, value, (value + 1) % d_vocab) if end else (value + 1) % d_vocab
        return value * torch.linspace(0.5, 1.5, value.shape[-1])

    def ask(n: int, hooks: list[tuple[str, Any]]) -> list[Tensor]:
        """The similarities of each copy's images and texts."""
        given = {name: x.repeat(n, *[1] * (x.ndim - 1)) for name, x in inputs.items()}
        logits = model.run_with_hooks(**given, fwd_hooks=hooks)
        n_images, n_texts = len(logits) // n, logits.shape[1] // n
        own = [logits[i * n_images : (i + 1) * n_images, i * n_texts : (i + 1) * n_texts] for i in range(n)]
        return [torch.cat(own)]

    assert without_effect(model, ask, bend, least=1e-5) == []


@torch.no_grad()
def test_names(case: Case):
    model, inputs = hooked_pair(case), pair_inputs(case)
    _, cache = model.run_with_cache(**inputs)
    assert cache["vision.z", -1] is cache[f"vision.blocks.{len(model.vision.blocks) - 1}.attn.hook_z"]
    assert cache["text.blocks.0.hook_out"] is cache["text.blocks.0.hook_resid_post"]
    assert cache["text.pattern", 0].shape[1:] == (model.cfg.n_heads, *[inputs["input_ids"].shape[1]] * 2)
    assert (cache["text.pattern", 0].triu(1) != 0).any() == (case.family == "siglip")
    with pytest.raises(KeyError, match="a short name begins with its side"):
        cache["z", 0]


@torch.no_grad()
def test_another_size_is_interpolated(case: Case):
    model, inputs = hooked_pair(case), pair_inputs(case)
    embed = model.vision.embed.cfg
    inputs["pixel_values"] = torch.randn(2, embed.n_channels, 3 * embed.patch_size, 5 * embed.patch_size)
    with pytest.raises(ValueError, match="does not fit: this tower has positions for"):
        model(**inputs)
    expected = theirs(case)(**inputs, interpolate_pos_encoding=True).logits_per_image
    assert_close(model(**inputs, interpolate_pos_encoding=True), expected)


# ---- text and errors -------------------------------------------------------------------------------------------------


def words(end: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words "w1" to "w50", which writes `end` after a text."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(f"$A w{end}", special_tokens=[(f"w{end}", end)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"w{end}", pad_token="w0")


@torch.no_grad()
def test_text(case: Case):
    """Texts of several lengths are what their ids are; SigLIP reads them all with the same number of tokens."""
    model = copy.deepcopy(hooked_pair(case))
    end = getattr(model.tree.text.pooler, "end", None) or 60
    model.set_tokenizer(words(end))
    texts, ids = ["w4 w9", "w11 w8 w30 w2"], [[4, 9, end, 0, 0], [11, 8, 30, 2, end]]
    n_ctx = model.cfg.n_ctx if case.family == "siglip" else 5
    padded = torch.tensor([row + [0] * (n_ctx - 5) for row in ids])
    assert model.to_tokens(texts).tolist() == padded.tolist()
    inputs = {"input_ids": padded, "pixel_values": pair_inputs(case)["pixel_values"]}
    expected = theirs(case)(**inputs).logits_per_image
    assert_close(model(texts, inputs["pixel_values"]), expected)
    assert_close(model(texts[0], inputs["pixel_values"]), expected[:, :1], scale=expected)
    assert model.to_str_tokens("w4 w9") == ["w4", "w9", f"w{end}"]
    with pytest.raises(ValueError, match=f"more than the model's n_ctx of {model.cfg.n_ctx}"):
        model.encode_text("w4 " * 50)


def test_what_does_not_fit_is_refused(case: Case):
    model, inputs = hooked_pair(case), pair_inputs(case)
    with pytest.raises(ValueError, match="return_type must be one of 'logits_per_image'"):
        model(**inputs, return_type="logits")
    with pytest.raises(ValueError, match="are synonyms"):
        model(inputs["input_ids"], **inputs)
    with pytest.raises(ValueError, match="token id 61"):
        model.encode_text(torch.tensor([[61, 60, 7]]))
    if end := getattr(model.tree.text.pooler, "end", None):
        with pytest.raises(ValueError, match=rf"text 1 has no end token \(id {end}\)"):
            model.encode_text(torch.tensor([[8, end], [5, 3]]))
    with pytest.raises(ValueError, match="a dual encoder is built from a tree"):
        HookedDualEncoder(HookedDualEncoderConfig(n_layers=1, d_model=8, n_ctx=4, n_heads=1))


def test_a_model_of_a_tree(case: Case):
    """Without a checkpoint: random weights, of a similarity that is not nothing."""
    model = HookedDualEncoder(HookedDualEncoderConfig.from_tree(hooked_pair(case).tree, device="cpu", seed=0))
    assert model.verify().ok
    with pytest.raises(ValueError, match="built from a config"):
        model.to_hf()


def test_older_configs(case: Case, checkpoint: Path, tmp_path: Path):
    """Configs of 2021 write down what generation could have done."""
    config = json.loads((checkpoint / "config.json").read_text())
    noise = {
        "num_beams": 1,
        "top_k": 50,
        "max_length": 20,
        "temperature": 1.0,
        "tie_word_embeddings": True,
        "top_p": 1.0,
    }
    for side in ("text_config", "vision_config"):
        config[side] |= {**noise, "torch_dtype": "float32", "use_bfloat16": False, "pruned_heads": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    model = HookedDualEncoder.from_pretrained(tmp_path)
    assert_same_tensors(dict(model.named_parameters()), dict(hooked_pair(case).named_parameters()))
