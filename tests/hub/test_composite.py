"""Composites (images and text, sounds and text): their language model loads, on text alone."""

import copy
import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, HookedTransformer, hub
from hooked_lm.hub.logit_factors import APPLIED
from hooked_lm.pretrained import from_pretrained_no_processing as load
from tests.close import assert_apart, assert_close
from tests.core import thinned
from tests.families import CASES
from tests.families._case import GROUPED, SIZES, WRONG, draw
from tests.families._composite import COMPOSITES, composite, model_class
from tests.families._models import save_shuffled

WIDE = {**GROUPED, "head_dim": 16}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# The fields of a language model besides its sizes.
TEXTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), GROUPED),
    "qwen3": WIDE,
    "gemma3_text": {**WIDE, **ALTERNATING, "query_pre_attn_scalar": 9},
    "gemma4_text": {
        **GROUPED,
        **ALTERNATING,
        "head_dim": 8,
        "global_head_dim": 16,
        "pad_token_id": 0,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 61,
    },
    "cohere2": {**ALTERNATING, "num_key_value_heads": 2, "layer_norm_eps": 0.02, "logit_scale": 0.5},
    "exaone4": {**GROUPED, **ALTERNATING},
    "granite": {**GROUPED, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.7},
    "opt": {"ffn_dim": 48, "intermediate_size": None, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "persimmon": {"layer_norm_eps": 0.02},
    "deepseek_v3": {
        "rms_norm_eps": 0.02,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "n_group": 1,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}
INSIDE = {case.composite: case for case in reversed(CASES) if case.composite is not None}
KINDS = thinned([*COMPOSITES, *INSIDE], keep=("llava", "gemma3", "idefics3", "blip-2", "qwen2_vl", "aya_vision"))
FUSED = (
    "deepseek_ocr2",
    "step3p7",
    "kimi_k25",
    "glm4v_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_5_moe",
    "aria",
    "dots3_note",
    "ernie4_5_vl_moe",
    "molmo2",
)  # modules have experts in one tensor, files do not; or projections the other way round
TOKENS = torch.randint(12, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def text_of(kind: str) -> dict[str, Any]:
    """The fields of a composite's language model."""
    if kind in INSIDE:
        return {**INSIDE[kind].fields, "model_type": INSIDE[kind].family}
    family = COMPOSITES[kind]
    known = next(case.fields for case in CASES if case.family == family)
    fields = {**({**SIZES, **TEXTS[family]} if family in TEXTS else known), "model_type": family}
    return {name: value for name, value in fields.items() if value is not None or name == "pad_token_id"}


def made(kind: str, **fields: Any) -> Any:
    """A random composite; `fields` are further ones of its language model."""
    return draw(composite(kind, {**text_of(kind), **fields}), seed=len(kind))


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """The logits of a composite on text alone; those that ask for an image have a language model with a head."""
    inner = getattr(model, "language_model", None)
    return (inner if hasattr(inner, "lm_head") else model)(input_ids=TOKENS).logits


def in_folder(folder: Path, model: Any, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint with the config of `model` and these tensors."""
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def of_modules(model: Any) -> dict[str, Tensor]:
    """The tensors of a composite by the names of its modules; tied ones are written once."""
    tied = set(model.all_tied_weights_keys or ())
    return {name: value for name, value in model.state_dict().items() if name not in tied}


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A checkpoint of LLaVA in the spelling that transformers writes."""
    folder = tmp_path / "llava"
    made("llava").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_language_model_computes_what_the_composite_does(kind: str, tmp_path: Path):
    """From its files in the names that transformers writes, in those of its modules, and from the object."""
    theirs = made(kind)
    expected = logits_of(theirs)
    theirs.save_pretrained(tmp_path / "disk")
    models = [load(tmp_path / "disk"), load("tiny", hf_model=theirs)]
    if kind not in FUSED:
        models.append(load(in_folder(tmp_path / "modules", theirs, of_modules(theirs))))
    if kind in ("aya_vision", "cohere2_vision", "granite_speech", "granite_speech_plus"):
        # their `forward` leaves out the scale of the logits, which the language model alone applies, as it was trained with
        assert_apart(models[0](TOKENS), expected)
        expected = expected * models[0].cfg.tree.unembed.scale
    for model in models:
        assert isinstance(model, HookedTransformer)
        assert_close(model(TOKENS), expected)
        assert model.cfg.original_architecture == type(theirs).__name__
        assert model.cfg.left_out or kind == "gemma4"  # whose towers are None by default
    in_file = load_file(tmp_path / "disk" / "model.safetensors")
    assert sum((models[0].cfg.left_out or {}).values()) == sum(not is_text(name, kind) for name in in_file)


# Parts inside of a language model that only images use.
FOR_IMAGES = {"mllama": r"\.layers\.[12]\.", "ernie4_5_vl_moe": r"\.experts\.[4-7]\.|gate\.weight_1"}


def is_text(name: str, kind: str) -> bool:
    """Whether a tensor is one of the language model on text alone."""
    if re.search(FOR_IMAGES.get(kind, "(?!)"), name):
        return False
    beside_towers = name.removeprefix("model.").startswith(("layers.", "embed_tokens.", "norm.", "transformer.", "hc_"))
    return beside_towers or any(part in name for part in ("language_model.", "text_model.", "lm_head"))


SEQ2SEQ = {"florence2": "bart", "blip-2": "t5", "instructblip": "t5", "instructblipvideo": "t5"}


GRANITE = next(case.fields for case in CASES if case.family == "granite")


@pytest.mark.parametrize(
    ("kind", "fields", "left_out"),
    [
        ("gemma3", {"final_logit_softcapping": 2.0}, "the soft cap of 2"),
        ("llava_next", {**GRANITE, "model_type": "granite", "logits_scaling": 4.0}, "the scale of 0.25"),
        ("granite_speech", {"logits_scaling": 4.0}, "the scale of 0.25"),
        ("gemma3n", {"final_logit_softcapping": 2.0}, ""),
    ],
)
@torch.no_grad()
def test_factors_of_logits_that_transformers_leaves_out_are_kept_and_said(
    kind: str, fields: dict[str, Any], left_out: str, caplog: pytest.LogCaptureFixture
):
    theirs = draw(composite(kind, {**text_of(kind), **fields}), seed=3)
    with caplog.at_level(logging.WARNING, logger="hooked_lm.hub.hf_load"):
        model = load("tiny", hf_model=theirs)
    said = [record.message for record in caplog.records if "trained with it" in record.message]
    expected = logits_of(theirs)
    if left_out:
        assert_apart(model(TOKENS), expected)
        cap, scale = model.cfg.tree.unembed.soft_cap, 1.0 / fields.get("logits_scaling", 1.0)
        expected = scale * expected if cap is None else cap * (expected / cap).tanh()
        assert len(said) == 1
        assert said[0].startswith(f"the logits have {left_out}, as those of the language model alone")
    else:
        assert not said
    assert_close(model(TOKENS), expected)


def test_which_composites_apply_what_their_language_model_does_to_logits():
    """By what `forward` of their classes names: a scale, a cap, or a language model with an unembedding."""
    factors = re.compile(r"logit_scale|logits_scaling|softcapping|output_multiplier")
    for kind in {*COMPOSITES, *INSIDE} - {"phi4_multimodal", *WRONG}:  # whose config is that of its language model
        source = inspect.getsource(model_class(kind).forward)
        applies = "lm_head(" not in source or factors.search(source) is not None
        assert applies == (kind in APPLIED), kind


@pytest.mark.parametrize("kind", thinned(SEQ2SEQ, keep=("blip-2",)))
@torch.no_grad()
def test_encoder_decoders(kind: str, tmp_path: Path):
    fields = next(case.fields for case in CASES if case.family == SEQ2SEQ[kind])
    theirs = draw(composite(kind, {**fields, "model_type": SEQ2SEQ[kind]}), seed=3)
    theirs.save_pretrained(tmp_path)
    inner, target = getattr(theirs, "language_model", None), TOKENS[:, :5]
    expected = (inner if hasattr(inner, "lm_head") else theirs)(input_ids=TOKENS, decoder_input_ids=target).logits
    for model in (load(tmp_path), load("tiny", hf_model=theirs)):
        assert isinstance(model, HookedEncoderDecoder)
        assert model.cfg.left_out
        assert_close(model(TOKENS, target), expected)
    with pytest.raises(ValueError, match="cannot be written back: left out were"):
        model.to_hf()


@pytest.mark.slow
@torch.no_grad()
def test_flan_t5_with_a_head_of_its_own(tmp_path: Path):
    """The config of T5 says in any case that the head is tied."""
    fields = next(case.fields for case in CASES if case.family == "t5")
    theirs = draw(composite("blip-2", {**fields, "model_type": "t5"}), seed=3)
    head = torch.randn(theirs.language_model.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
    in_folder(tmp_path, theirs, of_modules(theirs) | {"language_model.lm_head.weight": head})
    again, target = type(theirs).from_pretrained(tmp_path).eval(), TOKENS[:, :5]
    assert_close(load(tmp_path)(TOKENS, target), again.language_model(TOKENS, decoder_input_ids=target).logits)
    assert_apart(load(tmp_path)(TOKENS, target), theirs.language_model(TOKENS, decoder_input_ids=target).logits)


@pytest.mark.parametrize("kind", thinned(["internvl", "qwen3_vl", "llava"], keep=("internvl",)))
@pytest.mark.parametrize("is_tied", [True, False])
@torch.no_grad()
def test_tied_and_untied(kind: str, is_tied: bool, tmp_path: Path):
    theirs = made(kind, tie_word_embeddings=is_tied)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.cfg.tie_word_embeddings is is_tied
    assert_close(model(TOKENS), logits_of(theirs))


@torch.no_grad()
def test_a_head_that_differs_is_not_tied(tmp_path: Path):
    """As in transformers: InternVL's config says by default that the head is tied, and files have another one."""
    theirs = made("internvl", tie_word_embeddings=True)
    head = torch.randn(theirs.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
    model = load(in_folder(tmp_path, theirs, of_modules(theirs) | {"lm_head.weight": head}))
    assert not model.cfg.tie_word_embeddings
    assert_close(model(TOKENS), theirs.model(input_ids=TOKENS).last_hidden_state @ head.T)


def test_a_missing_head_is_refused(tmp_path: Path):
    theirs = made("llava")
    tensors = {name: value for name, value in of_modules(theirs).items() if "lm_head" not in name}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(in_folder(tmp_path, theirs, tensors))


OLDER = {  # spellings of checkpoints that were published before transformers 5
    "llava": {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"},
    "qwen2_vl": {"model.language_model.": "model.", "model.visual": "visual"},
    "qwen2_5_omni_thinker": {
        "model.language_model.": "thinker.model.",
        "lm_head": "thinker.lm_head",
        "model.": "thinker.",
    },
    "idefics3": {"model.text_model.": "text_model.model.", "lm_head": "text_model.lm_head"},
    "gemma3": {"model.language_model.": "model.language_model.model."},
    "internvl": {"model.language_model.": "llm.model.", "lm_head": "llm.lm_head"},
    "mllama": {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"},
}


@pytest.mark.parametrize("kind", thinned(OLDER, keep=("llava", "qwen2_vl")))
@torch.no_grad()
def test_older_names(kind: str, tmp_path: Path):
    theirs = made(kind)

    def older(name: str) -> str:
        start = next((start for start in OLDER[kind] if name.startswith(start)), "")
        return OLDER[kind].get(start, "") + name.removeprefix(start)

    tensors = {older(name): value for name, value in of_modules(theirs).items()}
    assert tensors.keys() != of_modules(theirs).keys()
    assert_close(load(in_folder(tmp_path, theirs, tensors))(TOKENS), logits_of(theirs))


@torch.no_grad()
def test_a_config_without_a_part_for_text(tmp_path: Path):
    """The published config of Qwen2-VL has the fields of its language model beside `vision_config`."""
    theirs = made("qwen2_vl")
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    text = written.pop("text_config")
    (tmp_path / "config.json").write_text(json.dumps(text | written))
    assert_close(load(tmp_path)(TOKENS), logits_of(theirs))


@torch.no_grad()
def test_shards_in_any_order(llava: Path, tmp_path: Path):
    (tmp_path / "shuffled").mkdir()
    save_shuffled(load_file(llava / "model.safetensors"), llava, tmp_path / "shuffled")
    assert torch.equal(load(tmp_path / "shuffled")(TOKENS), load(llava)(TOKENS))


@torch.no_grad()
def test_first_layers_and_folding(llava: Path):
    cut = load(llava, first_n_layers=1)
    assert cut.cfg.n_layers == 1
    folded = HookedTransformer.from_pretrained(llava)
    assert folded.cfg.processed
    assert_close(folded(TOKENS).log_softmax(-1), load(llava)(TOKENS).log_softmax(-1))
    assert load(llava).verify(TOKENS).ok


def test_what_was_left_out_is_said_once(llava: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "hooked_lm"):
        model = load(llava)
    left_out = {"multi_modal_projector": 4, "vision_tower": 23}
    assert model.cfg.left_out == left_out
    assert [record.getMessage() for record in caplog.records] == [
        "loaded the language model (llama) of a LlavaForConditionalGeneration; left out: multi_modal_projector (4 tensors), "
        "vision_tower (23 tensors); HookedVisionLanguage.from_pretrained loads all of it"
    ]
    assert copy.deepcopy(model.cfg).left_out == left_out


def test_a_checkpoint_of_text_alone_leaves_out_nothing(caplog: pytest.LogCaptureFixture):
    assert load("demo").cfg.left_out is None
    assert not caplog.records


@torch.no_grad()
def test_it_cannot_be_written_back(llava: Path, tmp_path: Path):
    """Only the language model alone, if that is asked for."""
    model = load(llava)
    reason = r"language model of a LlavaForConditionalGeneration.* left out were .*vision_tower \(23 tensors\)"
    for write in (model.to_hf, lambda: model.save_pretrained(tmp_path / "new")):
        with pytest.raises(ValueError, match=reason):
            write()
    assert not (tmp_path / "new").exists()
    model.cfg.left_out = None
    theirs = model.to_hf()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert_close(theirs(TOKENS).logits, model(TOKENS))
    model.save_pretrained(tmp_path / "new")
    assert torch.equal(load(tmp_path / "new")(TOKENS), model(TOKENS))


def test_a_language_model_without_a_class_is_not_written_alone():
    model = load("tiny", hf_model=made("qwen2_vl"))
    model.cfg.left_out = None
    with pytest.raises(ValueError, match="no class for a qwen2_vl_text alone"):
        model.to_hf()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llava", "model.language_model.layers.0.self_attn.gate.weight"),
        ("qwen2_vl", "model.layers.1.cross_attn.q_proj.weight"),
    ],
)
def test_tensors_of_the_language_model_that_nobody_reads_are_refused(kind: str, name: str, tmp_path: Path):
    theirs = made(kind)
    tensors = of_modules(theirs)
    if kind == "qwen2_vl":
        tensors = {old.replace("model.language_model.", "model."): value for old, value in tensors.items()}
    folder = in_folder(tmp_path, theirs, {**tensors, name: torch.zeros(3)})
    with pytest.raises(ValueError, match=rf"tensors that a \w+ has not: {name}"):
        load(folder)


def test_a_file_without_a_language_model_is_refused(tmp_path: Path):
    theirs = made("llava")
    folder = in_folder(tmp_path, theirs, theirs.model.vision_tower.state_dict())
    with pytest.raises(ValueError, match="no tensor has the name of a language model's embedding"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("blip", {}, "the language model of this blip cannot be loaded: model_type 'blip_text_model' is not supported"),
        ("modernvbert", {}, "the language model of this modernvbert is a modernbert, an encoder"),
        ("llava", {"model_type": "reformer"}, "'reformer' is not supported"),
        ("not_a_type", {"model_type": "llama"}, "model_type 'not_a_type' is not supported"),
    ],
)
def test_composites_without_a_decoder_of_ours_are_refused(kind: str, text: dict[str, Any], reason: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    with pytest.raises(ValueError, match=reason):
        load(tmp_path)


def test_fields_of_the_language_model_are_checked_and_not_overridden(llava: Path):
    with pytest.raises(ValueError, match="image_seq_length cannot be given for a llava"):
        load(llava, image_seq_length=3)
    theirs = made("llava")
    theirs.config.text_config.field_of_tomorrow = 4
    with pytest.raises(ValueError, match="field_of_tomorrow=4"):
        load("tiny", hf_model=theirs)


@torch.no_grad()
def test_paligemma_is_causal():
    """Its config makes attention bidirectional for prompts with images; a text that it generates sees only what is before."""
    theirs = made("paligemma")
    assert theirs.config.text_config.use_bidirectional_attention
    model = load("tiny", hf_model=theirs)
    changed = TOKENS.clone()
    changed[:, -1] = 13
    assert torch.equal(model(changed)[:, :-1], model(TOKENS)[:, :-1])
    generated = {"token_type_ids": torch.ones_like(TOKENS), "labels": None}
    theirs.set_attn_implementation("sdpa")
    assert_close(model(TOKENS), theirs(input_ids=TOKENS, **generated).logits)


VERIFIED = ("blip-2", "aya_vision", "qwen2_5_omni_thinker")  # no class of ours reads their images


@pytest.mark.parametrize("kind", thinned(VERIFIED, keep=("blip-2",)))
def test_verify(kind: str, tmp_path: Path):
    made(kind).save_pretrained(tmp_path)
    report = hub.verify(tmp_path, n_tokens=4)
    assert report.ok, str(report)
    assert "logits as in transformers, of the language model alone" in str(report)
