"""LoRA adapters that are on for the runs of a `with` block: what peft computes, and weights that stay as they were."""

import contextvars
import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from hooked_lm import HookedTransformer, patching, pretrained
from hooked_lm.analysis import fit_jacobian_lens
from hooked_lm.engine.fingerprint import Digest
from hooked_lm.hub import LoRA
from hooked_lm.models.weights.digest import sampled_digest, weights_digest
from hooked_lm.models.weights.weight_scope import open_scopes, scoped_values
from tests.close import GRADIENT, assert_apart, assert_close, assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft

TOKENS = torch.arange(14).view(2, 7) + 3
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WITHOUT_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
slow = pytest.mark.slow
load = pretrained.from_pretrained_no_processing
Prompt = "The capital of France is"


def tiny(kind: str, **sizes: Any) -> Any:
    """A tiny random model of transformers, of the same weights in each call."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    ending = "ForMaskedLM" if kind == "Bert" else "ForCausalLM" if kind != "GPT2" else "LMHeadModel"
    return getattr(transformers, kind.removesuffix("Text") + ending)(config).eval()


def gpt2() -> Any:
    return tiny("GPT2", vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)


def llama() -> Any:
    return tiny("Llama", **GROUPED)


def adapted(hf: Any, folder: Path, targets: Any = "all-linear", **options: Any) -> Any:
    """The model under a LoRA that peft drew at random and wrote to a folder."""
    torch.manual_seed(1)
    options = dict[str, Any](
        {"r": 4, "init_lora_weights": False} | {"fan_in_fan_out": hf.config.model_type == "gpt2"} | options
    )
    found = peft.get_peft_model(hf, peft.LoraConfig(target_modules=targets, **options))
    found.eval().save_pretrained(folder)
    return found


FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,  # Conv1D, and queries, keys and values in one matrix
    "llama": llama,  # grouped heads, gated MLPs
    "qwen3": lambda: tiny("Qwen3", **GROUPED, head_dim=8),
    "gemma2": lambda: tiny("Gemma2", **GROUPED, head_dim=8),
    "gemma3": lambda: tiny("Gemma3Text", **GROUPED, head_dim=8),
    "phi3": lambda: tiny("Phi3", **GROUPED),  # gate and input of the MLP in one matrix
    "gpt_neox": lambda: tiny("GPTNeoX", **{**SIZES, "num_attention_heads": 2}),  # parts within each head
    "falcon": lambda: tiny("Falcon", **_WITHOUT_MLP, new_decoder_architecture=True, num_kv_heads=2),
    "bloom": lambda: tiny("Bloom", hidden_size=16, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2),
    "bert": lambda: tiny("Bert", **SIZES),
}


@pytest.mark.parametrize("kind", ["gpt2", "llama", *(pytest.param(kind, marks=slow) for kind in [*FAMILIES][2:])])
@pytest.mark.every_parameter
@torch.no_grad()
def test_an_adapter_that_is_on_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    model = load(hf_model=FAMILIES[kind](), device="cpu")
    theirs = adapted(FAMILIES[kind](), tmp_path)
    before, weights = model(TOKENS), {name: weight.clone() for name, weight in model.state_dict().items()}
    with model.with_adapter(tmp_path) as same:
        inside = model(TOKENS)
        assert same is model
        assert_equal(dict(model.state_dict()), weights)
    assert_close(inside, theirs(TOKENS).logits)
    assert_close(inside, load(hf_model=theirs, device="cpu")(TOKENS))
    assert_apart(inside, before)
    assert torch.equal(model(TOKENS), before)
    assert_equal(dict(model.state_dict()), weights)


PATTERNS: dict[str, Any] = {
    "rank_pattern": {r"layers\.1\..*q_proj": 2},
    "alpha_pattern": {"down_proj": 3},
    "use_rslora": True,
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "bias": "all",
    "modules_to_save": ["lm_head"],
}


@torch.no_grad()
def test_ranks_and_scales_by_module_biases_and_whole_weights(tmp_path: Path) -> None:
    def made() -> Any:
        return tiny("Llama", **GROUPED, attention_bias=True)

    model, hf = load(hf_model=made(), device="cpu"), made()
    theirs = adapted(hf, tmp_path, ["q_proj", "down_proj"], lora_alpha=5, **PATTERNS)
    for name, weight in theirs.named_parameters():
        if name.endswith("bias") or "modules_to_save" in name:
            weight.add_(0.3)
    theirs.save_pretrained(tmp_path)
    lora = LoRA.load(tmp_path)
    assert {len(part.A) for part in lora.parts.values()} == {2, 4}
    assert len(lora.parts) == 2
    assert "and 9 whole weights" in repr(lora)
    with model.with_adapter(lora):
        assert_close(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")  # it is in the file, and read
@torch.no_grad()
def test_an_untied_embedding(tmp_path: Path) -> None:
    model = load(hf_model=llama(), device="cpu")
    theirs = adapted(llama(), tmp_path, ["embed_tokens", "v_proj"])
    with model.with_adapter(tmp_path):
        assert_close(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_dora": True}, r"use_dora=True in .*: not supported in a `with` block; load it merged"),
        ({"init_lora_weights": "pissa"}, "training began by changing the weights"),
        ({"peft_type": "IA3"}, "type IA3, and with_adapter switches on LoRA alone"),
        ({"target_parameters": ["experts"]}, "target_parameters="),
        ({"r": 3}, "has rank 4, and .* says 3"),
    ],
)
@pytest.mark.every_parameter
def test_other_kinds_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    LoRA.new(load("demo", device="cpu"), targets=["c_fc"]).save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        LoRA.load(tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = load("demo", device="cpu")
    lora = LoRA.new(model)
    with pytest.raises(ValueError, match=r"rewritten \(.*fold_ln.*from_pretrained_no_processing"):
        pretrained.from_pretrained("demo", device="cpu").with_adapter(lora)
    with pytest.raises(ValueError, match=r"no row of a HookedTransformer .* reads that; |the nearest"):
        load(hf_model=llama(), device="cpu").with_adapter(lora)
    with pytest.raises(ValueError, match=r"does not fit this model: .*shapes do not fit"):
        load(hf_model=gpt2(), device="cpu").with_adapter(lora)
    with pytest.raises(ValueError, match=r"no linear layer in a block has a name that ends with 'q_proj'; .* c_attn"):
        LoRA.new(model, targets=["q_proj"])
    tied = LoRA({}, {"transformer.wte.weight": model.W_E.detach()}, {}, "of the embedding")
    with pytest.raises(ValueError, match="which the model ties to another weight"):
        model.with_adapter(tied)
    own = HookedTransformer({"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5, "act_fn": "relu"})
    with pytest.raises(ValueError, match="not loaded from one"):
        own.with_adapter(lora)
    with pytest.raises(ValueError, match=r"is no adapter: there is no adapter_config\.json"):
        model.with_adapter(tmp_path)


def random_adapter(model: HookedTransformer, seed: int = 0, **options: Any) -> LoRA:
    """An adapter with random matrices."""
    lora, generator = LoRA.new(model, seed=seed, **options), torch.Generator().manual_seed(seed)
    for part in lora.parts.values():
        part.B.data.copy_(torch.randn(part.B.shape, generator=generator) * 0.05)
    return lora


@torch.no_grad()
def test_other_threads_see_the_weights_alone() -> None:
    model = load("demo", device="cpu")
    before, seen = model(Prompt), dict[str, torch.Tensor]()
    with model.with_adapter(random_adapter(model)):
        thread = threading.Thread(target=lambda: seen.update(logits=model(Prompt), W_Q=model.blocks[0].attn.W_Q))
        thread.start()
        thread.join()
        assert_apart(model(Prompt), before)
        assert_apart(model.blocks[0].attn.W_Q, seen["W_Q"])
    assert torch.equal(seen["logits"], before)
    assert seen["W_Q"] is model.blocks[0].attn.W_Q
    assert type(model.blocks[0].attn._parameters) is dict


@torch.no_grad()
def test_adapters_add_up_and_end_in_any_order() -> None:
    model = load("demo", device="cpu")
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    weight = model.blocks[1].mlp.W_in
    outer, inner = model.with_adapter(first), model.with_adapter(second)
    with outer:
        of_first = model.blocks[1].mlp.W_in
        with pytest.raises(RuntimeError, match="is already open"), outer:
            pass
        with inner:
            both = model.blocks[1].mlp.W_in
            assert len(open_scopes(model)) == 2
    with inner:
        of_second = model.blocks[1].mlp.W_in
        there = contextvars.copy_context()
    assert there.run(open_scopes, model) == []
    assert_close(both - weight, (of_first - weight) + (of_second - weight), scale=weight.abs().max())
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert torch.equal(model.blocks[1].mlp.W_in, of_second)
    inner.__exit__()
    assert model.blocks[1].mlp.W_in is weight


def test_gradients_reach_the_adapter_and_the_weights() -> None:
    model = load("demo", device="cpu")
    lora = random_adapter(model, targets=["c_attn", "c_fc"])
    with model.with_adapter(lora):
        loss = model(Prompt, return_type="loss")
    part = lora.parts["transformer.h.1.attn.c_attn.weight"]
    of_A, of_W = torch.autograd.grad(loss, [part.A, model.blocks[1].attn.W_V])
    whole = torch.zeros(3, *model.blocks[1].attn.W_V.shape)
    whole[2] = of_W  # of c_attn [d_model, 3 n h]: transposed, scale B A
    others = torch.autograd.grad(model_loss(model, lora), [model.blocks[1].attn.W_Q, model.blocks[1].attn.W_K])
    whole[0], whole[1] = others
    of_matrix = whole.permute(2, 0, 1, 3).flatten(1)
    assert_close(of_A, part.scale * part.B.T @ of_matrix.T, depth=GRADIENT)


@torch.no_grad()
def test_a_step_of_training_counts_inside_of_the_block() -> None:
    model = load("demo", device="cpu")
    lora = random_adapter(model, targets=["c_fc"])
    with model.with_adapter(lora):
        before, weight = model(Prompt), model.blocks[0].mlp.W_in
        assert model.blocks[0].mlp.W_in is weight  # computed once
        lora.parts["transformer.h.0.mlp.c_fc.weight"].B.mul_(2)
        assert_apart(model(Prompt), before)
        assert_close(
            model.blocks[0].mlp.W_in - weight, weight - load("demo", device="cpu").blocks[0].mlp.W_in, scale=1.0
        )


def model_loss(model: HookedTransformer, lora: LoRA) -> torch.Tensor:
    with model.with_adapter(lora):
        loss: torch.Tensor = model(Prompt, return_type="loss")
    return loss


@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_peft_reads_what_is_saved(tmp_path: Path) -> None:
    hf = gpt2()
    model = load(hf_model=hf, device="cpu")
    with model.with_adapter(LoRA.new(model)):
        assert_close(model(TOKENS), load(hf_model=hf, device="cpu")(TOKENS))
    lora = random_adapter(model, rank=3, alpha=5.0)
    lora.save(tmp_path)
    with model.with_adapter(tmp_path):
        inside = model(TOKENS)
    assert_close(inside, peft.PeftModel.from_pretrained(hf, tmp_path).eval()(TOKENS).logits)


def test_what_is_kept_of_a_run_knows_the_adapter(tmp_path: Path) -> None:
    model = load("demo", device="cpu")
    lora = random_adapter(model)
    prefix, digest = model.prefix("The capital of"), Digest().of(model)
    with model.with_adapter(lora):
        with pytest.raises(ValueError, match="the adapter a new adapter' changed after this prefix was computed"):
            model(prefix + " France")
        assert Digest().of(model) != digest
        inside = model("The capital of France")
        under = model.prefix("The capital of")
        assert_close(model(under + " France")[:, -1], inside[:, -1])
        with pytest.raises(ValueError, match="is not pickled"):
            pickle.dumps(model)
        assert_close(copy.deepcopy(model)("The capital of"), load("demo", device="cpu")("The capital of"))
    assert Digest().of(model) == digest
    model(prefix + " France")
    with pytest.raises(ValueError, match="changed after this prefix"):
        model(under + " France")


def test_compiled_models_run_eagerly_under_an_adapter() -> None:
    model = load("demo", device="cpu")
    run = model.compiled(backend="traced")
    tokens = model.to_tokens(Prompt)
    with torch.no_grad(), model.with_adapter(random_adapter(model)):
        expected = model(tokens)
        with pytest.warns(UserWarning, match="runs eagerly because of the adapter a new adapter, which is switched on"):
            assert torch.equal(run(tokens), expected)


def test_checkpointing_is_refused_as_it_would_forget_the_adapter() -> None:
    model = load("demo", device="cpu")
    with (
        model.with_adapter(random_adapter(model)),
        pytest.raises(ValueError, match="activation checkpointing computes the forward pass again outside of it"),
    ):
        checkpoint(model, model.to_tokens(Prompt), use_reentrant=False)


@torch.no_grad()
def test_sweeps_and_caches_under_an_adapter_are_those_of_the_merged_model(tmp_path: Path) -> None:
    hf = gpt2()
    model, theirs = load(hf_model=hf, device="cpu"), adapted(gpt2(), tmp_path, ["c_attn", "c_proj"])
    merged = load(hf_model=theirs, device="cpu")
    with model.with_adapter(tmp_path):
        found, cache = (
            patching.sweep(model, TOKENS[:1], TOKENS[1:], by="layer", metric=_first),
            model.run_with_cache(TOKENS)[1],
        )
        assert_close(model.OV.AB, merged.OV.AB)
    assert_close(found.values, patching.sweep(merged, TOKENS[:1], TOKENS[1:], by="layer", metric=_first).values)
    for name, value in merged.run_with_cache(TOKENS)[1].items():
        assert_close(cache[name], value)


def _first(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 0]


@torch.no_grad()
def test_hashes_of_weights_are_of_those_that_runs_use() -> None:
    model, merged = load("demo", device="cpu"), load("demo", device="cpu")
    texts = [
        "The capital of France is Paris.",
        "Mary was ill, so she slept late.",
        "The key of the box is on the table.",
    ]
    before = weights_digest(model), sampled_digest(model)
    of_base = fit_jacobian_lens(model, texts, layers=[1], progress=False)
    with model.with_adapter(random_adapter(model, targets=["c_fc"])):
        for name, value in scoped_values(model):
            merged.get_parameter(name).copy_(value)
        inside = weights_digest(model), sampled_digest(model)
        assert inside == (weights_digest(merged), sampled_digest(merged))
        facts = model.run_with_cache(Prompt)[1].model_facts()
        of_adapter = fit_jacobian_lens(model, texts, layers=[1], progress=False)
        with pytest.raises(ValueError, match="fitted on other weights"):
            of_base.check(model, "resid_post", [1])
    assert (weights_digest(model), sampled_digest(model)) == before
    assert not {*inside} & {*before}
    assert facts == merged.run_with_cache(Prompt)[1].model_facts() != model.run_with_cache(Prompt)[1].model_facts()
    of_adapter.check(merged, "resid_post", [1])
    with pytest.raises(ValueError, match="fitted on other weights"):
        of_adapter.check(model, "resid_post", [1])


@torch.no_grad()
@pytest.mark.parametrize(
    "rewrite",
    [
        lambda model: model.process_weights_(),
        lambda model: model.quantize("int8"),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.load_and_process_state_dict(model.state_dict(), fold_ln=False),
        lambda model: model.init_weights(),
    ],
    ids=["fold", "quantize", "load", "load and process", "init"],
)
def test_weights_are_not_rewritten_under_an_adapter(rewrite: Callable[[HookedTransformer], object]) -> None:
    model = load("demo", device="cpu")
    before = model(Prompt)
    with (
        model.with_adapter(random_adapter(model)),
        pytest.raises(ValueError, match="rewrites the weights in place, and the adapter a new adapter is switched on"),
    ):
        rewrite(model)
    assert torch.equal(model(Prompt), before)
    assert not model.cfg.processed


@torch.no_grad()
def test_a_prefix_knows_that_its_adapter_was_trained_and_which_others_are_open() -> None:
    model = load("demo", device="cpu")
    first, second = (random_adapter(model, seed, targets="c_fc") for seed in range(2))
    with model.with_adapter(first):
        prefix = model.prefix("The capital of")
        model(prefix + " France")
        with model.with_adapter(second), pytest.raises(ValueError, match="a new adapter inside of another' changed"):
            model(prefix + " France")
        first.parts["transformer.h.0.mlp.c_fc.weight"].B.mul_(2)
        with pytest.raises(ValueError, match="the adapter a new adapter' changed after this prefix"):
            model(prefix + " France")
    with model.with_adapter(first), model.with_adapter(second):
        prefix = model.prefix("The capital of")
        assert_close(model(prefix + " France")[:, -1], model("The capital of France")[:, -1])


def test_a_loaded_adapter_trains_on(tmp_path: Path) -> None:
    model = load("demo", device="cpu")
    random_adapter(model, targets="c_fc").save(tmp_path)
    lora = LoRA.load(tmp_path)
    assert len(lora.parts) == 4
    before, optimiser = model_loss(model, lora).item(), torch.optim.SGD(lora.parameters(), lr=0.1)
    model_loss(model, lora).backward()
    assert all(matrix.grad is not None and bool(matrix.grad.any()) for matrix in lora.parameters())
    optimiser.step()
    assert model_loss(model, lora).item() < before
