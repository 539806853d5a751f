"""Where models come from and where they go: directories, objects, damaged files, options, memory."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hooked_lm import HookedTransformer, HookedTransformerConfig, hub, pretrained
from tests.close import assert_apart, assert_close, is_close
from tests.families import CASES, reference

GPT2, LLAMA = (next(c for c in CASES if str(c) == name) for name in ("gpt2-tied", "llama-grouped"))
TOKENS = torch.arange(14).view(2, 7)
load = pretrained.from_pretrained_no_processing


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    reference(GPT2).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    reference(LLAMA).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def same_logits(model: HookedTransformer, expected: Tensor) -> bool:
    return is_close(model(TOKENS), expected)


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_a_directory(gpt2: Path, capfd: pytest.CaptureFixture[str]):
    capfd.readouterr()
    model = HookedTransformer.from_pretrained_no_processing(str(gpt2))
    assert capfd.readouterr() == ("", "")
    assert same_logits(model, reference(GPT2)(TOKENS).logits)
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
    cfg = model.cfg
    assert (cfg.model_name, cfg.original_architecture, cfg.device) == ("gpt2", "GPT2LMHeadModel", "cpu")
    assert (cfg.n_layers, cfg.d_model, cfg.n_ctx, cfg.dtype, cfg.processed) == (2, 32, 40, torch.float32, ())
    assert model.tokenizer is None
    with pytest.raises(ValueError, match="tokenizer"):
        model("text")


def test_processing_is_the_default(gpt2: Path):
    model = HookedTransformer.from_pretrained(gpt2)
    assert {"fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"} <= set(model.cfg.processed)
    assert_close(model(TOKENS).log_softmax(-1), reference(GPT2)(TOKENS).logits.log_softmax(-1))
    assert "fold_ln" not in HookedTransformer.from_pretrained(gpt2, fold_ln=False).cfg.processed
    assert "fold_ln" not in HookedTransformer.from_pretrained(gpt2, False).cfg.processed


def test_a_loaded_model_is_in_evaluation_mode(gpt2: Path):
    """As a model of transformers is; one that is built from a config is about to be trained."""
    model = HookedTransformer.from_pretrained(gpt2)
    assert not any(module.training for module in model.modules())
    assert HookedTransformer(model.cfg).training


def test_a_subclass(gpt2: Path):
    class Mine(HookedTransformer):
        def __init__(self, cfg: HookedTransformerConfig, tokenizer: Any = None):
            super().__init__(cfg, tokenizer=tokenizer)

    assert type(Mine.from_pretrained_no_processing(gpt2)) is Mine


@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=str)
def test_a_model_object_is_left_as_it_was(case: Any):
    theirs = copy.deepcopy(reference(case))
    before = copy.deepcopy(theirs.state_dict())
    model = load("mine", hf_model=theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    with pytest.raises(ValueError, match="rms_norm_eps"):
        load("mine", hf_model=theirs, rms_norm_eps=0.1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_a_lora_model_is_merged_on_a_copy():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(reference(LLAMA)), config).eval()
    expected, names = theirs(TOKENS).logits, set(theirs.state_dict())
    assert_apart(expected, reference(LLAMA)(TOKENS).logits)
    model = load("lora", hf_model=theirs)
    assert same_logits(model, expected)
    assert set(theirs.state_dict()) == names
    assert torch.equal(theirs(TOKENS).logits, expected)


def test_a_base_model_has_no_prefix(gpt2: Path, tmp_path: Path):
    reference(GPT2).transformer.save_pretrained(tmp_path / "base")
    assert "wte.weight" in load_file(tmp_path / "base" / "model.safetensors")
    assert same_logits(load(tmp_path / "base"), load(gpt2)(TOKENS))
    assert same_logits(load("base", hf_model=reference(GPT2).transformer), load(gpt2)(TOKENS))


def test_shards(llama: Path, tmp_path: Path):
    reference(LLAMA).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(load(tmp_path / "sharded")(TOKENS), load(llama)(TOKENS))
    next((tmp_path / "sharded").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="missing"):
        load(tmp_path / "sharded")


def test_pickles(llama: Path):
    expected = load(llama, mmap=False)(TOKENS)
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save(tensors, llama / "pytorch_model.bin")
    assert torch.equal(load(llama)(TOKENS), expected)

    torch.save({**tensors, "model.norm.weight": RunsCode()}, llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match="refused"):
        load(llama)
    assert not (llama / "it_ran").exists()


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it_ran",)


def test_buffers_of_old_checkpoints_are_passed_over(gpt2: Path, llama: Path):
    rewrite(gpt2, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 40, 40)}))
    rewrite(llama, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(gpt2), load(llama)


def test_a_written_out_tied_weight(gpt2: Path):
    head = reference(GPT2).transformer.wte.weight.detach().clone()
    rewrite(gpt2, lambda t: t.update({"lm_head.weight": head}))
    assert same_logits(load(gpt2), reference(GPT2)(TOKENS).logits)
    rewrite(gpt2, lambda t: t.update({"lm_head.weight": head + 1}))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs"):
        load(gpt2)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_damaged_files(llama: Path):
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or not a safetensors file"):
        load(llama)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(llama)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected one of model\.safetensors"):
        load(llama)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'",
        ),
        (
            lambda t: t.update(adapter=torch.ones(2)),
            r"no row for the tensor 'adapter' in .*model\.safetensors",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            r"no row for the tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"'model\.norm\.weight' in .*31"),
    ],
)
def test_tensors_that_do_not_fit(llama: Path, change: Any, message: str):
    rewrite(llama, change)
    with pytest.raises(ValueError, match=message):
        load(llama)


def test_unknown_architectures(llama: Path):
    set_config(llama, model_type="reformer", auto_map={"AutoConfig": "evil.Config"})
    (llama / "evil.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match=r"'reformer' is not supported; supported are .*gpt2.*hooks\.wrap"):
        load(llama)
    (llama / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not a model's config"):
        load(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(llama)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_without_scales_are_refused(llama: Path, dtype: torch.dtype):
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
    rewrite(llama, lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in names}))
    message = rf"'{names[0]}' \(and 1 more tensors\) is {dtype}, whose scales cannot be read: load the original"
    for options in ({}, {"dtype": "auto"}):
        with pytest.raises(ValueError, match=message):
            load(llama, **options)
    model = HookedTransformer(
        HookedTransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, attn_only=True)
    )
    state = model.state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match=rf"'embed.W_E' is {dtype}, whose scales cannot be read"):
            model.load_state_dict(state | {"embed.W_E": state["embed.W_E"].to(dtype)}, strict=strict)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"bits": 4}}, r"quantization_config in .*use the original checkpoint.*pass hf_model="),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "twist": 3}}, "twist"),
    ],
)
def test_config_fields_that_nobody_reads(llama: Path, fields: dict[str, Any], message: str):
    set_config(llama, **fields)
    with pytest.raises(ValueError, match=message):
        load(llama)


def test_fields_without_effect(llama: Path):
    set_config(llama, attention_dropout=0.5, use_cache=False, unsloth_version="2", rope_interleaved=False)
    assert same_logits(load(llama), reference(LLAMA)(TOKENS).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "cpu", "device": "cpu"}, "device_map"),
        ({"trust_remote_code": True}, "never run"),
        ({"load_in_8bit": True}, r"load_in_8bit=True is not supported: .* call model\.quantize\('int8'\)"),
        ({"first_n_layers": 0}, "2 layers"),
        ({"first_n_layers": 3}, "2 layers"),
        ({"n_ctx": 0}, "n_ctx=0"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float33"}, "float33"),
        ({"checkpoint_value": 3}, "no checkpoints of"),
        ({"checkpoint_value": 3, "checkpoint_index": 1}, "not several"),
    ],
)
def test_options_that_cannot_be_honoured(llama: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(llama, **options)


def test_a_model_object_with_quantised_weights(llama: Path):
    class Int8Tensor(Tensor):
        __module__ = "torchao.quantization"

    theirs = LlamaForCausalLM.from_pretrained(llama)
    weight = theirs.model.layers[0].mlp.up_proj.weight
    theirs.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().as_subclass(Int8Tensor))
    with pytest.raises(
        ValueError,
        match=r"layers.0.mlp.up_proj.weight' of the given model is of type Int8Tensor, which is quantised: load its checkpoint",
    ):
        pretrained.from_pretrained("llama", hf_model=theirs)


def test_names_that_are_nowhere():
    with pytest.raises(ValueError, match=r"there is no directory 'gpt2-smal'.*gpt2-small"):
        load("gpt2-smal", local_files_only=True)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["gpt2", "llama"])
def test_first_layers(folder: str, request: pytest.FixtureRequest):
    path, case = request.getfixturevalue(folder), {"gpt2": GPT2, "llama": LLAMA}[folder]
    theirs = copy.deepcopy(reference(case))
    stack = theirs.transformer.h if folder == "gpt2" else theirs.model.layers
    del stack[1:]
    theirs.config.num_hidden_layers = 1
    model = load(path, first_n_layers=1)
    assert len(model.blocks) == model.cfg.n_layers == 1
    assert same_logits(model, theirs(TOKENS).logits)
    assert_close(model.to_hf()(TOKENS).logits, theirs(TOKENS).logits)
    assert model.to_hf().config.num_hidden_layers == 1


def test_n_ctx(gpt2: Path, llama: Path):
    with pytest.warns(UserWarning, match="n_ctx=100: the checkpoint has n_ctx"):
        longer = load(llama, n_ctx=100)
    assert longer.cfg.n_ctx == 100
    longer(torch.ones(1, 90, dtype=torch.long))
    with pytest.raises(ValueError, match="8 tokens"):
        load(gpt2, n_ctx=7)(torch.ones(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="embeddings for 40 positions"):
        load(gpt2, n_ctx=41)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.float16", "float64"])
def test_dtype(llama: Path, dtype: Any):
    model = load(llama, dtype=dtype)
    expected = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in model.parameters()} == {expected} == {model.cfg.dtype}
    assert torch.equal(model.blocks[0].attn.W_Q, load(llama).blocks[0].attn.W_Q.to(expected))
    assert load(llama, torch_dtype=dtype).cfg.dtype == expected


def test_dtype_of_the_checkpoint(tmp_path: Path):
    copy.deepcopy(reference(LLAMA)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).cfg.dtype == torch.float32
    model = load(tmp_path, dtype="auto")
    assert model.cfg.dtype == model.blocks[0].mlp.W_in.dtype == torch.bfloat16
    out = tmp_path / "out"
    model.save_pretrained(out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.to_hf().dtype == torch.bfloat16


def test_defaults_for_text_and_device(gpt2: Path):
    model = load(gpt2, default_prepend_bos=False, default_padding_side="left", device_map={"": "cpu"})
    assert (model.cfg.default_prepend_bos, model.cfg.default_padding_side) == (False, "left")
    assert load(gpt2, move_to_device=False).device.type == "cpu"


def test_fields_of_the_config_can_be_overridden(llama: Path):
    assert load(llama, rms_norm_eps=0.5).cfg.eps == 0.5


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<s>": 0, "the": 1, "cat": 2}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")


def test_the_tokenizer_beside_the_weights(gpt2: Path, tmp_path: Path):
    word_tokenizer().save_pretrained(gpt2)
    model = load(gpt2)
    assert model.to_tokens("the cat").tolist() == [[0, 1, 2]]
    model.save_pretrained(tmp_path / "out")
    assert load(tmp_path / "out").to_tokens("cat").tolist() == [[0, 2]]
    assert load(str(gpt2), hf_model=reference(GPT2)).to_tokens("cat").tolist() == [[0, 2]]
    mine = word_tokenizer()
    assert load(gpt2, tokenizer=mine).tokenizer is mine


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, llama: Path) -> list[dict[str, Any]]:
    """A hub on which every repository is the llama; the calls are recorded."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_a_hub_id(downloads: list[dict[str, Any]]):
    model = load("meta-llama/Some-Llama", revision="v2", local_files_only=True, token="t")
    assert same_logits(model, reference(LLAMA)(TOKENS).logits)
    assert (model.cfg.model_name, model.cfg.tokenizer_name) == ("Some-Llama", "meta-llama/Some-Llama")
    (call,) = downloads
    assert (call["name"], call["revision"], call["local_files_only"]) == ("meta-llama/Some-Llama", "v2", True)
    assert call["token"] == "t"
    assert not any("bin" in pattern for pattern in call["allow_patterns"])


def test_pickles_are_fetched_only_where_there_is_nothing_else(downloads: list[dict[str, Any]], llama: Path):
    tensors = load_file(llama / "model.safetensors")
    torch.save(tensors, llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    load("a/b")
    assert [call["allow_patterns"] for call in downloads][1:] == ["pytorch_model*.bin"]


def test_checkpoints_of_a_training_run(downloads: list[dict[str, Any]]):
    model = load("pythia-70m", checkpoint_value=512)
    assert (downloads[-1]["name"], downloads[-1]["revision"]) == ("EleutherAI/pythia-70m", "step512")
    cfg = model.cfg
    assert (cfg.from_checkpoint, cfg.checkpoint_value, cfg.checkpoint_label_type) == (True, 512, "step")
    load("pythia-70m", checkpoint_index=-1)
    assert downloads[-1]["revision"] == "step143000"
    load("stanford-gpt2-small-a", checkpoint_index=1)
    assert downloads[-1]["name"] == "stanford-crfm/alias-gpt2-small-x21"
    assert downloads[-1]["revision"] == "checkpoint-10"
    with pytest.raises(ValueError, match=r"no checkpoint at step 513; the nearest are \[512, 256\]"):
        load("pythia-70m", checkpoint_value=513)
    with pytest.raises(IndexError, match="there are 154"):
        load("pythia-70m", checkpoint_index=154)


def test_short_names():
    names = hub.short_names()
    assert names["gpt2-small"] == "openai-community/gpt2"
    assert all(name == name.lower() and hub_id.count("/") == 1 for name, hub_id in names.items())


# ---- memory and files ------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """44 MB of weights."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "large")
    return tmp_path / "large"


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def grown_by(folder: Path, **options: Any) -> float:
    """Anonymous memory that loading takes, in units of the checkpoint's bytes."""
    before = anonymous_bytes()
    model = load(folder, **options)
    grown = anonymous_bytes() - before
    assert model.blocks[0].attn.W_Q.isfinite().all()
    return grown / (folder / "model.safetensors").stat().st_size


def addresses_in_file(model: Any, folder: Path) -> set[bool]:
    """Whether the parameters lie in a map of the checkpoint's file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(folder / "model.safetensors")]
    maps = [(int(start, 16), int(end, 16)) for start, end in spans]
    return {any(start <= p.data_ptr() < end for start, end in maps) for p in model.parameters()}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's memory maps")
def test_weights_are_mapped_and_not_copied(large: Path):
    load(large)
    assert grown_by(large) <= 0.1
    assert addresses_in_file(load(large), large) == {True}
    assert addresses_in_file(load(large, mmap=False), large) == {False}  # the control: copies lie elsewhere
    assert grown_by(large, dtype="bfloat16") <= 0.5 * 1.15


def test_training_does_not_touch_the_file(llama: Path):
    before = (llama / "model.safetensors").read_bytes()
    model = load(llama)
    optimiser = torch.optim.Adam(model.parameters(), 0.1)
    clean = model(TOKENS)
    model(TOKENS, return_type="loss").backward()
    optimiser.step()
    assert_apart(model(TOKENS), clean)
    assert (llama / "model.safetensors").read_bytes() == before
    assert torch.equal(load(llama)(TOKENS), clean)


def test_copies_do_not_drag_the_file(large: Path, tmp_path: Path):
    model = load(large)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].attn.W_Q.zero_()
    assert model.blocks[0].attn.W_Q.abs().max() > 0
    torch.save(model.state_dict(), tmp_path / "all.pt")
    assert (tmp_path / "all.pt").stat().st_size < 1.1 * (large / "model.safetensors").stat().st_size
    torch.save(model.blocks[0].ln1.w, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 10_000


def test_saving_over_the_checkpoint_in_use(llama: Path):
    model = load(llama)
    with torch.no_grad():
        model.blocks[0].mlp.W_out.mul_(2)
    expected = model(TOKENS)
    model.save_pretrained(llama)
    assert torch.equal(load(llama)(TOKENS), expected)
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.slow
def test_transformers_is_not_imported_for_a_model_from_a_config():
    program = """
import sys
import hooked_lm.hub
from hooked_lm import HookedTransformer
cfg = dict(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, act_fn="relu")
HookedTransformer(cfg).run_with_cache(__import__("torch").zeros(1, 3, dtype=int))
sys.exit("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- back to HF ------------------------------------------------------------------------------------------------------


def test_a_model_without_a_family_is_not_exported(tmp_path: Path):
    cfg = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5, "act_fn": "relu"}
    with pytest.raises(ValueError, match="built from a config"):
        HookedTransformer(cfg).to_hf()
    with pytest.raises(ValueError, match="built from a config"):
        HookedTransformer(cfg).save_pretrained(tmp_path)


def test_a_folded_model_is_not_exported(gpt2: Path, tmp_path: Path):
    model = HookedTransformer.from_pretrained(gpt2)
    with pytest.raises(ValueError, match="fold_ln"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_export_has_memory_of_its_own(gpt2: Path):
    model = load(gpt2)
    theirs = model.to_hf()
    assert isinstance(theirs, GPT2LMHeadModel)
    with torch.no_grad():
        model.embed.W_E.zero_()
    assert theirs.transformer.wte.weight.abs().max() > 0


def test_an_untied_model_is_exported_untied(gpt2: Path):
    model = load(gpt2)
    model.untie()
    with torch.no_grad():
        model.unembed.W_U.mul_(2)
    theirs = model.to_hf()
    assert not theirs.config.tie_word_embeddings
    assert_close(theirs(TOKENS).logits, model(TOKENS))


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify(llama: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch):
    report = hub.verify(llama)
    assert report.ok
    assert report.checks[0].name == "logits as in transformers"
    assert len(report.checks) > 10
    monkeypatch.setattr("hooked_lm.families._shared.llama_like.n_ctx", lambda hf: 30)
    assert hub.verify(llama).ok

    from hooked_lm.families.decoders import gpt2 as family
    from hooked_lm.weights import Row

    right = family.rows

    def swapped(tree: Any) -> list[Row]:
        rows = right(tree)
        return [
            Row(
                row.source,
                row.target,
                row.pattern,
                tied=row.tied,
                **{**row.axes, **({"qkv": "KQV"} if "qkv" in row.axes else {})},
            )
            for row in rows
        ]

    monkeypatch.setattr(family, "rows", swapped)
    report = hub.verify(gpt2)
    assert not report.ok
    assert report.failed[0] == "logits as in transformers"
    assert "FAILED" in str(report)
