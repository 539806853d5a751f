"""What the table's comparison of state-space models would notice, and that their states carry something."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.experts.moe import MoE
from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_close
from tests.families import recent_state_space, state_space
from tests.families._models import assert_past_matters, distance, hooked, logits_of, prompt, with_tree

CASES = {str(case): case for case in (*state_space.CASES, *recent_state_space.CASES)}
Change = Callable[[Any], dict[str, Any]]


def every_mixer(change: Change) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        if not isinstance(block, MixerPart.Config):
            return block
        return replace(block, mixer=replace(block.mixer, **change(block.mixer)))

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def every_attention(change: Change) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        if isinstance(block, MixerPart.Config):
            return block
        return replace(block, attn=replace(block.attn, **change(block.attn)))

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def every_attention_in_a_mixer(change: Change) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        return replace(block, attn=replace(block.attn, **change(block.attn))) if hasattr(block, "attn") else block

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def every_router(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        if not isinstance(getattr(block, "mlp", None), MoE.Config):
            return block
        return replace(block, mlp=replace(block.mlp, router=replace(block.mlp.router, **changes)))

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def every_block(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: replace(tree, blocks=tuple(replace(block, **changes) for block in tree.blocks))


def every_mlp(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: replace(
        tree, blocks=tuple(replace(block, mlp=replace(block.mlp, **changes)) for block in tree.blocks)
    )


def every_norm(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        return replace(block, ln1=replace(block.ln1, **changes))

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


WRONG_TREES = {
    "activation behind the convolution": (
        "mamba-no-conv-bias-three-taps-gelu",
        every_mixer(lambda _: {"act_fn": "gelu_new"}),
    ),
    "eps of the norm": ("mamba-tied", every_norm(eps=1e-5)),
    "eps of the norm behind the gate": ("mamba2-grouped", every_mixer(lambda _: {"eps": 1e-5})),
    "no least step": (
        "mamba2-one-group-biased-tied-limited-steps",
        every_mixer(lambda m: {"dt_limit": (0.0, m.dt_limit[1])}),
    ),
    "no largest step": (
        "mamba2-one-group-biased-tied-limited-steps",
        every_mixer(lambda m: {"dt_limit": (m.dt_limit[0], float("inf"))}),
    ),
    "eps of the norms of B and C": (
        "falcon_mamba-tied",
        every_mixer(lambda m: {"state_norm": replace(m.state_norm, eps=1e-6)}),
    ),
    "eps of the norm of the step": (
        "falcon_mamba-tied",
        every_mixer(lambda m: {"dt_norm": replace(m.dt_norm, eps=1e-6)}),
    ),
    "renormalised experts": (
        "lfm2_moe-no-correction-not-renormalised-scaled",
        every_router(renormalize=True),
    ),
    "missing scale of experts": ("lfm2_moe-no-correction-not-renormalised-scaled", every_router(scale=1.0)),
    "small term of the sum of weights": ("lfm2_moe-one-dense-layer", every_router(eps=0.1)),
    "scale of the shared attention": (
        "zamba-two-applications",
        every_attention_in_a_mixer(lambda a: {"scale": a.d_head**-0.5}),
    ),
    "multipliers of the parts of Mamba-2": (
        "falcon_h1-without-norm-of-mixers",
        every_mixer(lambda m: {"scaled": (*m.scaled[:-1], 1.0)}),
    ),
    "norm after the gate": (
        "falcon_h1-biased-tied-normed-before-gate",
        every_mixer(lambda _: {"norm_before_gate": False}),
    ),
    "multiplier of attention": ("falcon_h1-without-norm-of-mixers", every_block(attn_scale=1.0)),
    "multiplier of Mamba-2": ("falcon_h1-without-norm-of-mixers", every_block(mixer_scale=1.0)),
    "multiplier of the MLP": ("falcon_h1-without-norm-of-mixers", every_block(mlp_scale=1.0)),
    "multiplier of the gate": ("falcon_h1-without-norm-of-mixers", every_mlp(act_fn="silu")),
    "window of LFM3 one longer": ("lfm3-gated-sandwiched", every_attention(lambda a: {"window": (a.window or 40) + 1})),
    "gate of LFM3's heads": ("lfm3-gated-sandwiched", every_attention(lambda _: {"gate_act_fn": "tanh"})),
    "no least step of nemotron": (
        "nemotron_h-all-kinds-grouped-experts-gelu-least-step",
        every_mixer(lambda m: {"dt_limit": (0.0, m.dt_limit[1])}),
    ),
    "activation of the gate": ("recurrent_gemma-two-to-one", every_mixer(lambda _: {"act_fn": "relu"})),
    "scale of the embedding that is not rounded": (
        "recurrent_gemma-two-to-one",
        lambda tree: replace(tree, embed=replace(tree.embed, scale=32**0.5)),
    ),
    "window one longer": ("recurrent_gemma-two-to-one", every_attention(lambda a: {"window": a.window + 1})),
    "all of a head turned": (
        "recurrent_gemma-two-to-one",
        every_attention(lambda a: {"rotary": replace(a.rotary, dim=a.d_head)}),
    ),
    "soft cap": (
        "recurrent_gemma-attention-first-tight-cap-silu",
        lambda tree: replace(tree, unembed=replace(tree.unembed, soft_cap=30.0)),
    ),
    "half of a head unturned": (
        "bamba-two-attention-layers",
        every_attention(lambda a: {"rotary": replace(a.rotary, dim=a.d_head)}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    least = 1e-4 if "rounded" in wrong else 1e-3
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > least


def swap(one: str, other: str) -> Callable[[Any], None]:
    def damage(mixer: Any) -> None:
        first, second = getattr(mixer, one), getattr(mixer, other)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    return damage


def reverse_taps(mixer: Any) -> None:
    mixer.conv.W_conv.copy_(mixer.conv.W_conv.flip(0))


def reverse(name: str) -> Callable[[Any], None]:
    def damage(mixer: Any) -> None:
        getattr(mixer, name).copy_(getattr(mixer, name).flip(0))

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("mamba-tied", swap("W_x", "W_gate")),
        ("mamba-tied", swap("W_B", "W_C")),
        ("mamba-tied", reverse_taps),
        ("mamba-tied", reverse("A_log")),
        ("mamba-tied", reverse("D")),
        ("mamba-tied", reverse("dt_bias")),
        ("mamba2-grouped", swap("W_x", "W_gate")),
        ("mamba2-grouped", swap("W_B", "W_C")),
        ("mamba2-grouped", reverse("A_log")),
        ("recurrent_gemma-two-to-one", swap("W_r", "W_i")),
        ("recurrent_gemma-two-to-one", swap("b_r", "b_i")),
        ("recurrent_gemma-two-to-one", swap("W_x", "W_gate")),
        ("recurrent_gemma-two-to-one", reverse("Lambda")),
        ("bamba-two-attention-layers", reverse_taps),
        ("jamba-sparse-every-other-layer", swap("W_B", "W_C")),
        ("zamba-two-applications", swap("W_B", "W_C")),
        ("zamba-two-applications", swap("W_x", "W_gate")),
        ("zamba-two-applications", reverse("W_dt_up")),
        ("lfm2-convolutions-around-attention", reverse_taps),
        ("lfm2-convolutions-around-attention", swap("W_B", "W_gate")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(next(block.mixer for block in model.blocks if isinstance(block, MixerPart)))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_states_carry_something(name: str) -> None:
    assert_past_matters(CASES[name])


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mamba", "rms_norm", False),
        ("mamba2", "rms_norm", False),
        ("recurrent_gemma", "embeddings_scale_by_sqrt_dim", False),
        ("recurrent_gemma", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10.0}),
    ],
)
def test_what_transformers_does_not_know_is_refused(name: str, field: str, value: Any) -> None:
    values = CONFIG_MAPPING[name]().to_dict()
    family(name).config(HFConfig(values, {}))
    with pytest.raises(
        ValueError, match="rope_type 'linear'" if field == "rope_parameters" else f"transformers ignores {field}=False"
    ):
        family(name).config(HFConfig(values | {field: value}, {}))


@pytest.mark.parametrize(
    ("bias", "multiplier"), [("attention_bias", "attention_in_multiplier"), ("mamba_proj_bias", "ssm_in_multiplier")]
)
def test_input_multipliers_of_projections_with_biases_are_refused(bias: str, multiplier: str) -> None:
    with pytest.raises(ValueError, match=f"{multiplier}=0.5 is not supported together with {bias}=True"):
        read_config(family("falcon_h1"), CONFIG_MAPPING["falcon_h1"](**{bias: True, multiplier: 0.5}))


def test_applications_share_weights_but_no_sites() -> None:
    case = CASES["zamba-two-applications"]
    model, tokens = copy.deepcopy(hooked(case)), prompt(case)
    first, second = model.blocks[1], model.blocks[3]
    assert first.attn.W_Q is second.attn.W_Q
    assert first.W_shared is not second.W_shared
    assert "blocks.1.attn.W_Q" in dict(model.named_parameters())
    assert "blocks.3.attn.W_Q" not in dict(model.named_parameters())
    _, cache = model.run_with_cache(tokens)
    assert not torch.equal(cache["pattern", 1], cache["pattern", 3])
    state = model.state_dict()
    model.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'blocks.3.attn.W_Q' differs from 'blocks.1.attn.W_Q'"):
        model.load_state_dict({**state, "blocks.3.attn.W_Q": 2 * state["blocks.3.attn.W_Q"]})


def test_flags_reach_shared_attention() -> None:
    model = copy.deepcopy(hooked(CASES["zamba-two-applications"]))
    tokens = prompt(CASES["zamba-two-applications"])
    expected = model(tokens)
    model.set_ungroup_grouped_query_attention(True)
    found, cache = model.run_with_cache(tokens)
    assert cache["k", 3].shape[2] == 4
    assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("zamba")])
def test_shared_weights_and_adapters_are_counted(name: str) -> None:
    model = hooked(CASES[name])
    outside = ("conv.W_conv", "A_log")
    matrices = {n: p for n, p in model.blocks.named_parameters() if ".W_" in n and not n.endswith(outside)}
    assert model.cfg.n_params == sum(p.numel() for p in matrices.values())


def test_adapters_belong_to_layers_and_count() -> None:
    case = CASES["zamba2-two-sets-in-turn-adapted-attention-rotary"]
    model, tokens = copy.deepcopy(hooked(case)), prompt(case)
    first, other, again = (model.blocks[layer] for layer in (1, 3, 4))
    assert first.mlp.W_in is again.mlp.W_in
    assert first.mlp.W_in is not other.mlp.W_in
    assert first.mlp.adapter.W_down is not again.mlp.adapter.W_down
    for adapter in (again.mlp.adapter, again.attn.q_adapter, again.attn.k_adapter, again.attn.v_adapter):
        kept = adapter.W_down.detach().clone()
        with torch.no_grad():
            adapter.W_down.zero_()
            assert distance(model(tokens), logits_of(case, tokens)) > 1e-3
            adapter.W_down.copy_(kept)


def test_a_layer_that_reads_the_embedding_needs_the_tokens() -> None:
    case = CASES["zamba-two-applications"]
    model, tokens = hooked(case), prompt(case)
    resid = model(tokens, stop_at_layer=1)
    assert_close(model(resid, start_at_layer=1, tokens=tokens), model(tokens))
    with pytest.raises(ValueError, match="layer 1 reads the embedding of the tokens"):
        model(resid, start_at_layer=1)


def test_lfm2_moe_needs_the_types_of_its_layers() -> None:
    """Transformers builds no model without them; it derives those of LFM2."""
    with pytest.raises(ValueError, match="layer_types is missing"):
        read_config(family("lfm2_moe"), CONFIG_MAPPING["lfm2_moe"]())
    blocks = read_config(family("lfm2"), CONFIG_MAPPING["lfm2"]()).blocks
    assert not any(isinstance(block, MixerPart.Config) for block in blocks)


@pytest.mark.parametrize(
    ("name", "fields", "n_attentions"),
    [
        ("mamba", {"d_model": 768, "n_layer": 24, "ssm_cfg": {}, "rms_norm": True, "pad_vocab_size_multiple": 8}, 0),
        ("mamba2", {"norm_before_gate": True, "rms_norm": True, "time_step_init_scheme": "random"}, 0),
        ("recurrent_gemma", {"_block_types": ["recurrent"], "embeddings_scale_by_sqrt_dim": True}, 8),
        ("bamba", {"attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "use_mamba_kernels": True}, 3),
    ],
)
def test_configs_of_the_first_checkpoints(name: str, fields: dict[str, Any], n_attentions: int) -> None:
    tree = read_config(family(name), CONFIG_MAPPING[name](**fields))
    assert sum(not isinstance(block, MixerPart.Config) for block in tree.blocks) == n_attentions


@torch.no_grad()
def test_a_stream_in_half_precision_would_be_noticed() -> None:
    """`residual_in_fp32` is kept: without it the logits are those of another model."""
    case = CASES["mamba-tied"]
    right, tokens = hooked(case), prompt(case, batch=8)
    tree = right.cfg.tree
    narrow = replace(tree, blocks=tuple(replace(block, wide_stream=False) for block in tree.blocks))
    model = with_tree(right, narrow)
    wide = copy.deepcopy(right).to(torch.bfloat16)(tokens)
    assert not torch.equal(model.to(torch.bfloat16)(tokens), wide)
