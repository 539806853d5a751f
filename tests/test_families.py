"""What every line of `tests/families.py` buys: the numbers of transformers, under names that mean what they say."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from hooked_lm import HookedTransformer, hub
from hooked_lm.components.attention import Attention
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norm import LayerNorm, RMSNorm
from hooked_lm.families import family, supported
from hooked_lm.families._reader import HFConfig
from hooked_lm.models.config import DecoderConfig, HookedTransformerConfig
from tests.families import CASES, Case, reference

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def hooked(case: Case) -> HookedTransformer:
    """The case's model as we load it; whoever wants to change it takes a copy."""
    return hub.from_pretrained_no_processing("tiny", hf_model=reference(case))


@pytest.fixture
def folder(tmp_path: Path, case: Case) -> Path:
    """The case's checkpoint on disk."""
    reference(case).save_pretrained(tmp_path)
    return tmp_path


def prompt(case: Case, batch: int = 3, length: int | None = None) -> Tensor:
    shape = (batch, length or case.n_prompt)
    return torch.randint(case.fields["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(case: Case, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What transformers says; rotary embeddings that depend on earlier runs start afresh."""
    return copy.deepcopy(reference(case)).to(dtype)(tokens).logits


def test_the_table_covers_every_family():
    assert {case.family for case in CASES} == set(supported())
    assert all(sum(case.family == name for case in CASES) >= 3 for name in supported())


# ---- the same numbers ------------------------------------------------------------------------------------------------


@each_case
def test_logits(case: Case):
    tokens = prompt(case)
    expected = logits_of(case, tokens)
    assert 0.3 < expected.std() < 10, "a comparison of logits near zero, or far from one, would say nothing"
    assert (hooked(case)(tokens) - expected).abs().max() <= 1e-4


@each_case
def test_attention_is_uneven(case: Case):
    _, cache = hooked(case).run_with_cache(prompt(case))
    pattern = cache["pattern", 0]
    seen = (pattern > 0).sum(-1)
    assert ((pattern.amax(-1) * seen)[seen > 1]).mean() > 1.3


@each_case
def test_gradients(case: Case):
    theirs, ours = copy.deepcopy(reference(case)), copy.deepcopy(hooked(case))
    tokens = prompt(case)
    weights = torch.randn(*tokens.shape, case.fields["vocab_size"]) / tokens.numel()
    (theirs(tokens).logits * weights).sum().backward()
    (ours(tokens) * weights).sum().backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    found = dict(ours.to_hf().named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@each_case
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    tokens = prompt(case, batch=8)
    truth = logits_of(case, tokens, torch.float64)
    theirs = logits_of(case, tokens, torch.bfloat16).double()
    ours = copy.deepcopy(hooked(case)).to(torch.bfloat16)(tokens).double()
    assert (ours - truth).pow(2).mean().sqrt() <= 1.2 * (theirs - truth).pow(2).mean().sqrt()


# ---- the way in and out ----------------------------------------------------------------------------------------------


@each_case
def test_tensors_may_come_in_any_order(case: Case, folder: Path):
    tensors = list(load_file(folder / "model.safetensors").items())
    random.shuffle(tensors)
    (folder / "model.safetensors").unlink()
    torch.save(dict(tensors), folder / "pytorch_model.bin")
    model = hub.from_pretrained_no_processing(folder)
    assert_same_tensors(dict(model.named_parameters()), dict(hooked(case).named_parameters()))


@each_case
def test_export_is_exact(case: Case, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    model, out = hub.from_pretrained_no_processing(folder), tmp_path_factory.mktemp("out")
    model.save_pretrained(out)
    assert_same_tensors(load_file(out / "model.safetensors"), load_file(folder / "model.safetensors"))
    again = hub.from_pretrained_no_processing(out)
    assert_same_tensors(dict(again.named_parameters()), dict(model.named_parameters()))
    assert_same_tensors(model.to_hf().state_dict(), reference(case).state_dict())
    assert torch.equal(
        model.to_hf()(prompt(case)).logits, type(reference(case)).from_pretrained(out)(prompt(case)).logits
    )


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


REFUSED_IF_CHANGED = {"gpt2": {"add_cross_attention"}, "gemma2": {"use_bidirectional_attention"}}


@pytest.mark.parametrize("name", supported())
def test_every_config_field_is_accounted_for(name: str):
    """Each is read, or known to have no effect, or refused when it is not at its default."""
    from transformers import CONFIG_MAPPING

    values, module = CONFIG_MAPPING[name]().to_dict(), family(name)
    hf = HFConfig(values, dict.fromkeys(values, "something else"))
    module.config(hf)
    unread = set(hf.unread(getattr(module, "NO_EFFECT", ())))
    assert unread == {"is_encoder_decoder"} | REFUSED_IF_CHANGED.get(name, set())


@pytest.mark.parametrize("case", [next(c for c in CASES if c.family == name) for name in supported()], ids=str)
def test_a_field_that_nobody_reads_is_refused(case: Case, folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_sinks": 4}))
    with pytest.raises(ValueError, match="attention_sinks=4"):
        hub.from_pretrained_no_processing(folder)


# ---- sites -----------------------------------------------------------------------------------------------------------


def expected_sites(model: HookedTransformer) -> set[str]:
    tree = model.cfg.tree
    names = {"hook_tokens", "hook_embed", "ln_final.hook_scale", "ln_final.hook_normalized"}
    names |= {"unembed.hook_in", "unembed.hook_out"} | ({"hook_pos_embed"} if tree.pos_embed else set())
    attention = {"q", "k", "v", "z", "attn_scores", "pattern", "result"}
    attention |= {"rot_q", "rot_k"} if tree.blocks[0].attn.rotary else set()
    block = {"hook_resid_pre", "hook_resid_post", "hook_attn_out", "hook_mlp_out"}
    block |= {"hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in"}
    block |= {f"attn.hook_{name}" for name in attention}
    block |= {f"mlp.hook_{name}" for name in ("in", "pre", "post", "out")}
    block |= {"mlp.hook_pre_linear"} if model.cfg.gated_mlp else set()
    block |= set() if model.cfg.parallel_attn_mlp else {"hook_resid_mid"}
    norms = ["ln1", "ln2"]
    norms += ["ln1_post", "ln2_post"] if model.cfg.use_normalization_before_and_after else []
    norms += ["attn.q_norm", "attn.k_norm"] if model.cfg.use_qk_norm else []
    block |= {f"{norm}.hook_{name}" for norm in norms for name in ("scale", "normalized")}
    return names | {f"blocks.{layer}.{name}" for layer in range(model.cfg.n_layers) for name in block}


@each_case
def test_sites_and_their_shapes(case: Case):
    model, cfg = hooked(case), hooked(case).cfg
    assert set(model.hook_dict) == expected_sites(model)
    tokens = prompt(case)
    sizes = {"batch": 3, "pos": case.n_prompt, "query_pos": case.n_prompt, "key_pos": case.n_prompt, "1": 1}
    sizes |= {"head": cfg.n_heads, "kv_head": cfg.n_key_value_heads or cfg.n_heads, "d_head": cfg.d_head}
    sizes |= {"d_model": cfg.d_model, "d_mlp": cfg.d_mlp, "d_vocab": cfg.d_vocab}
    _, found = model.run_with_cache(tokens, names_filter="*")
    for name, value in found.items():
        assert value.shape == tuple(sizes[dim] for dim in model.hook_dict[name].dims), name


@each_case
def test_every_site_is_alive(case: Case):
    model, tokens = hooked(case), prompt(case, batch=1, length=8)
    clean = model(tokens)

    def edit(value: Tensor, hook: Any) -> Tensor:
        if not value.is_floating_point():
            return (value + 1) % case.fields["vocab_size"]
        return value * torch.linspace(0.5, 1.5, value.shape[-1])  # not a mere scale: norms would not see it

    dead = [
        name
        for name in model.hook_dict
        if (model.run_with_hooks(tokens, fwd_hooks=[(name, edit)]) - clean).abs().max() < 1e-3
    ]
    assert dead == []


@each_case
def test_identities(case: Case):
    report = hooked(case).verify(prompt(case))
    assert report.ok, str(report)


@each_case
def test_a_cache_does_not_change_the_logits(case: Case):
    tokens = prompt(case)
    logits, _ = hooked(case).run_with_cache(tokens)
    torch.testing.assert_close(logits, hooked(case)(tokens), rtol=1e-4, atol=3e-5)


# ---- batches and generation ------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_what_they_are_alone(case: Case, side: str):
    model, lengths = hooked(case), [12, 5, 9]
    rows = [prompt(case, batch=1, length=length)[0] for length in lengths]
    tokens, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(12 - len(row), None) if side == "left" else slice(len(row))
        tokens[i, span], mask[i, span] = row, 1
    together = model(tokens, attention_mask=mask)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i][mask[i].bool()], model(row[None])[0], rtol=1e-4, atol=1e-5)


@each_case
@torch.no_grad()
def test_greedy_tokens_with_a_cache(case: Case):
    model, tokens = hooked(case), prompt(case, batch=2, length=8)
    theirs = copy.deepcopy(reference(case))
    theirs.generation_config = GenerationConfig(pad_token_id=0)  # it does not stop before
    all_real = torch.ones_like(tokens)
    expected = theirs.generate(tokens, attention_mask=all_real, max_new_tokens=24, do_sample=False)
    cache = KeyValueCache(model.cfg.n_layers)
    new, logits = tokens, []
    for _ in range(24):
        logits.append(model(new, past_kv_cache=cache)[:, -1])
        new = logits[-1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(torch.stack(logits, 1), model(tokens)[:, 7:-1], rtol=1e-4, atol=1e-4)


# ---- folding ---------------------------------------------------------------------------------------------------------


@each_case
def test_folding_keeps_the_predictions(case: Case):
    folded = hub.from_pretrained("tiny", hf_model=reference(case))
    tokens = prompt(case)
    assert folded.cfg.processed
    found, expected = folded(tokens).log_softmax(-1), hooked(case)(tokens).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert folded.verify(tokens).ok, str(folded.verify(tokens))
    with pytest.raises(ValueError, match="rewritten"):
        folded.to_hf()


# ---- the comparison can fail -----------------------------------------------------------------------------------------


def every_block(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: replace(tree, blocks=tuple(replace(b, **changes) for b in tree.blocks))


def every_attn(
    change: Callable[[Attention.Config], dict[str, Any]],
) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: replace(
        tree, blocks=tuple(replace(b, attn=replace(b.attn, **change(b.attn))) for b in tree.blocks)
    )


def every_norm(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def alter(tree: DecoderConfig) -> DecoderConfig:
        norms = {"ln1": replace(tree.blocks[0].ln1, **changes), "ln2": replace(tree.blocks[0].ln2, **changes)}
        return every_block(**norms)(tree)

    return alter


def plain_rotary(attn: Attention.Config) -> dict[str, Any]:
    return {"rotary": replace(attn.rotary, scaling=None)}


def rotary(**changes: Any) -> Callable[[Attention.Config], dict[str, Any]]:
    return lambda attn: {"rotary": replace(attn.rotary, **changes)}


WRONG_TREES = {
    "eps of LayerNorm": ("gpt2-tied", every_norm(eps=1e-5)),
    "eps of RMSNorm": ("llama-grouped", every_norm(eps=1e-6)),
    "missing offset": ("gemma2-grouped", every_norm(offset=0.0)),
    "missing embedding scale": (
        "gemma2-grouped",
        lambda tree: replace(tree, embed=replace(tree.embed, scale=1.0)),
    ),
    "missing soft cap of scores": ("gemma2-tight-caps-all-local", every_attn(lambda _: {"soft_cap": None})),
    "missing soft cap of logits": (
        "gemma2-tight-caps-all-local",
        lambda tree: replace(tree, unembed=replace(tree.unembed, soft_cap=None)),
    ),
    "window one longer": ("mistral-window", every_attn(lambda a: {"window": a.window + 1})),
    "no window": ("phi3-window-tied", every_attn(lambda _: {"window": None})),
    "window in every layer": ("qwen2-window-from-layer-1", every_attn(lambda _: {"window": 5})),
    "scale of scores": ("gpt2-unscaled-scores-relu", every_attn(lambda _: {"scale": None})),
    "scale without layer": ("gpt2-inverse-layer-scale", every_attn(lambda _: {"scale": None})),
    "query_pre_attn_scalar": ("gemma2-grouped", every_attn(lambda _: {"scale": None})),
    "activation": ("gpt2-tied", lambda t: every_block(mlp=replace(t.blocks[0].mlp, act_fn="relu"))(t)),
    "adjacent pairs": ("llama-grouped", every_attn(rotary(adjacent_pairs=True))),
    "theta": ("llama-grouped", every_attn(rotary(theta=10000.0))),
    "rotary dimension": ("gpt_neox-parallel", every_attn(rotary(dim=4))),
    **{f"no {name}": (f"llama-{name}", every_attn(plain_rotary)) for name in ("linear", "dynamic", "llama3", "yarn")},
    "no longrope": ("phi3-longrope", every_attn(plain_rotary)),
}


def by_name(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    case = by_name(name)
    right = hooked(case)
    cfg = HookedTransformerConfig.from_tree(alter(right.cfg.tree), init_weights=False, device="cpu")
    model = HookedTransformer(cfg)
    model.load_state_dict(right.state_dict())
    assert (model(prompt(case)) - logits_of(case, prompt(case))).abs().max() > 1e-3


def negate(model: HookedTransformer) -> None:
    model.blocks[1].attn.W_O.neg_()


def swap_queries_and_keys(model: HookedTransformer) -> None:
    attn = model.blocks[0].attn
    attn.W_Q, attn.W_K = attn.W_K, attn.W_Q


def permute_heads(model: HookedTransformer) -> None:
    model.blocks[0].attn.W_Q.copy_(model.blocks[0].attn.W_Q.flip(0))


def swap_gate_and_linear(model: HookedTransformer) -> None:
    mlp = model.blocks[0].mlp
    mlp.W_gate, mlp.W_in = mlp.W_in, mlp.W_gate


def shift_positions(model: HookedTransformer) -> None:
    model.pos_embed.W_pos.copy_(model.pos_embed.W_pos.roll(1, 0))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gpt2-tied", negate),
        ("gpt2-tied", swap_queries_and_keys),
        ("gpt2-tied", shift_positions),
        ("gpt_neox-parallel", permute_heads),
        ("llama-grouped", permute_heads),
        ("phi3-grouped-partial-rotary", swap_gate_and_linear),
        ("qwen3-grouped", negate),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedTransformer], None]):
    case = by_name(name)
    model = copy.deepcopy(hooked(case))
    damage(model)
    assert (model(prompt(case)) - logits_of(case, prompt(case))).abs().max() > 1e-3


def test_norms_are_both_kinds():
    kinds = {type(hooked(case).cfg.tree.ln_final) for case in CASES}
    assert kinds == {LayerNorm.Config, RMSNorm.Config}
