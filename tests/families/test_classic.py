"""What the families of `tests/families/classic.py` refuse, and what the common tests of families do not ask of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.factored_embed import FactoredUnembed
from hooked_lm.components.embeddings.pos_embed import FairseqSinusoidalEmbed, PosEmbed, SinusoidalEmbed
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.weights.state import load_state
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES
from tests.families._case import Case, reference
from tests.families._models import hooked, logits_of, prompt, with_tree


def case(name: str, **changes: Any) -> Case:
    found = next(case for case in DECODER_CASES if str(case) == name)
    return replace(found, fields={**found.fields, **changes}) if changes else found


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("openai-gpt-tied", "afn", "tanh", "afn 'tanh' is none of gelu, relu"),
        ("codegen-half-rotary", "n_head", 2, "n_head is 2; .* multiple of 4"),
        ("falcon-new-grouped-two-norms", "parallel_attn", False, "needs parallel_attn=True"),
        ("falcon-one-kv-one-norm", "num_ln_in_parallel_attn", 2, "does not go with new_decoder_architecture=False"),
        (
            "falcon-all-kv-parallel-dynamic",
            "num_kv_heads",
            2,
            "num_kv_heads=2 of 4 heads needs new_decoder_architecture",
        ),
        ("mpt-tied", "no_bias", False, "transformers ignores no_bias=False"),
        ("mpt-tied", "norm_type", "rmsnorm", "transformers ignores norm_type='rmsnorm'"),
        ("mpt-tied", "logit_scale", 0.5, r"transformers ignores logit_scale=0\.5"),
        ("gpt_bigcode-one-kv", "add_cross_attention", True, "add_cross_attention=True"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(name: str, field: str, value: Any, message: str):
    theirs = copy.deepcopy(reference(case(name)))
    setattr(theirs.config, field, value)
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)


@pytest.mark.parametrize(
    ("field", "value"), [("qk_ln", True), ("alibi", False), ("alibi_bias_max", 4), ("prefix_lm", True), ("twist", 1)]
)
def test_a_config_within_a_config_is_read_as_closely(field: str, value: Any):
    theirs = copy.deepcopy(reference(case("mpt-tied")))
    setattr(theirs.config.attn_config, field, value)
    reason = "attn_config that are not supported:" if field == "twist" else "transformers ignores"
    with pytest.raises(ValueError, match=f"{reason} {field}={value}"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)


@pytest.mark.parametrize("name", ["xglm-tied", "bloom-tied"])
@torch.no_grad()
def test_positions_without_a_table_have_no_end(name: str):
    """Where positions are a formula a longer prompt is only a matter of the limit."""
    longer = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(case(name)), n_ctx=60)
    tokens = prompt(case(name), length=60)
    assert_close(longer(tokens), logits_of(case(name), tokens))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bloom-six-heads", {}),
        ("mpt-six-heads", {"max_seq_len": 400}),
        ("falcon-one-kv-alibi-twelve-heads", {"max_position_embeddings": 400}),
    ],
)
@torch.no_grad()
def test_linear_biases_of_long_prompts_in_half_precision(name: str, limit: dict[str, int]):
    """Biases in the hundreds, rounded, would tell a key from the next no more."""
    long = replace(case(name, **limit), name="long")
    tokens = prompt(long, batch=1, length=400)
    truth, theirs = logits_of(long, tokens, torch.float64), logits_of(long, tokens, torch.bfloat16)
    ours = copy.deepcopy(hooked(long)).to(torch.bfloat16)(tokens)
    assert (ours - truth).square().mean() <= 1.44 * (theirs - truth).square().mean()


def test_a_table_of_positions_has_an_end():
    with pytest.raises(ValueError, match="embeddings for 40 positions"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=reference(case("opt-tied")), n_ctx=41)


@pytest.mark.parametrize("name", ["opt-post-norm-projected", "opt-projected-untied"])
def test_weights_of_a_factored_model_are_shown_as_one(name: str):
    model = copy.deepcopy(hooked(case(name)))
    tokens, d_model = prompt(case(name)), model.cfg.d_model
    assert model.W_E.shape == (model.cfg.d_vocab, d_model)
    assert model.W_U.shape == (d_model, model.cfg.d_vocab)
    assert_close(model.W_E[tokens], model.embed(tokens))

    before = model(tokens)
    assert isinstance(model.unembed, FactoredUnembed)
    model.untie()
    assert type(model.unembed) is Unembed
    assert model.cfg.tree.unembed == model.unembed.cfg
    assert_close(model(tokens), before)
    assert model.verify(tokens).ok


@pytest.mark.parametrize("name", ["opt-post-norm-projected", "opt-projected-untied"])
@torch.no_grad()
def test_a_factored_model_takes_weights_that_were_multiplied(name: str):
    """Those of a model that was processed, saved, and comes back."""
    tree, tokens = hooked(case(name)).cfg.tree, prompt(case(name))
    processed = pretrained.from_pretrained("tiny", hf_model=reference(case(name)))
    model = HookedTransformer(HookedTransformerConfig.from_tree(tree, device="cpu"))
    model.load_and_process_state_dict(processed.state_dict(), False, False, False, False)
    assert_close(model(tokens), processed(tokens))
    wrong = {**processed.state_dict(), "unembed.W_U": processed.W_U[:, 1:]}
    with pytest.raises(ValueError, match=r"'unembed.W_U' is .*60"):
        HookedTransformer(HookedTransformerConfig.from_tree(tree, device="cpu")).load_and_process_state_dict(wrong)


def test_the_offset_of_positions_is_out_of_sight():
    model, table = hooked(case("opt-tied")), reference(case("opt-tied")).model.decoder.embed_positions.weight
    assert model.W_pos is model.pos_embed.W_pos
    assert torch.equal(model.W_pos, table[2:])
    assert torch.equal(model.pos_embed.before, table[:2])
    assert not model.pos_embed.before.requires_grad, "no position reads them"
    others = {name: value for name, value in model.state_dict().items() if name != "pos_embed.before"}
    again = with_tree(model, model.cfg.tree)
    load_state(again, others)  # as other libraries save them
    assert torch.equal(again.W_pos, model.W_pos)
    _, cache = model.run_with_cache(prompt(case("opt-tied")))
    assert torch.equal(cache["hook_pos_embed"][0], model.W_pos[: case("opt-tied").n_prompt])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bloom-tied", "alibi"),
        ("falcon-one-kv-alibi-twelve-heads", "alibi"),
        ("falcon-one-kv-one-norm", "rotary"),
        ("ctrl-tied", "sinusoidal"),
        ("opt-tied", "standard"),
    ],
)
def test_the_flat_name_of_positions(name: str, kind: str):
    assert hooked(case(name)).cfg.positional_embedding_type == kind


def test_local_layers_are_told_from_global_ones():
    cfg = hooked(case("gpt_neo-global-and-local")).cfg
    assert (cfg.attn_types, cfg.window_size, cfg.attn_scale) == (["global", "local", "local"], 5, 1.0)


@pytest.mark.parametrize(
    "name", ["bloom-tied", "opt-post-norm-projected", "gptj-half-rotary", "falcon-new-grouped-two-norms"]
)
@torch.no_grad()
def test_fewer_layers_give_the_stream_of_all(name: str):
    _, cache = hooked(case(name)).run_with_cache(prompt(case(name)))
    one = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(case(name)), first_n_layers=1)
    assert_close(one(prompt(case(name)), stop_at_layer=1), cache["resid_pre", 1])


# ---- the comparison can fail -----------------------------------------------------------------------------------------

Alter = Callable[[DecoderConfig], DecoderConfig]


def every_attn(**changes: Any) -> Alter:
    return lambda tree: replace(tree, blocks=tuple(replace(b, attn=replace(b.attn, **changes)) for b in tree.blocks))


def biased(**changes: Any) -> Alter:
    return lambda tree: every_attn(position_bias=replace(tree.blocks[0].attn.position_bias, **changes))(tree)


def qk_normed(**changes: Any) -> Alter:
    return lambda tree: every_attn(qk_norm=replace(tree.blocks[0].attn.qk_norm, **changes))(tree)


def standing(kind: type[PreNormBlock] | type[ParallelBlock]) -> Alter:
    """The sublayers of a block stand otherwise; a norm that there was not has no weights."""

    def alter(tree: DecoderConfig) -> DecoderConfig:
        block = tree.blocks[0]
        own = block.ln2 or replace(block.ln1, weight=False, bias=False)
        changed = kind.Config(attn=block.attn, ln1=block.ln1, mlp=block.mlp, ln2=own)
        return replace(tree, blocks=(changed,) * len(tree.blocks))

    return alter


def embedded(**changes: Any) -> Alter:
    return lambda tree: replace(tree, embed=replace(tree.embed, **changes))


def positioned(pos_embed: PosEmbed.Config | SinusoidalEmbed.Config) -> Alter:
    return lambda tree: replace(tree, pos_embed=pos_embed)


@dataclass(frozen=True)
class EvenSlopes(Alibi):
    """A geometric sequence for any number of heads."""

    def slopes(self) -> Tensor:
        return 2.0 ** (-self.max_slope * torch.arange(1, self.n_heads + 1) / self.n_heads)


WRONG_TREES: dict[str, tuple[str, Alter]] = {
    "no linear biases": ("bloom-tied", every_attn(position_bias=None)),
    "slopes of linear biases": ("bloom-tied", biased(max_slope=7.0)),
    "slopes in even steps": ("mpt-six-heads", every_attn(position_bias=EvenSlopes(6))),
    "linear biases not scaled with the scores": ("falcon-all-kv-alibi-biased-sequential", biased(scale=1.0)),
    "linear biases not rounded": ("falcon-one-kv-alibi-twelve-heads", biased(rounded=None)),
    "norm of the embedding": ("bloom-tied", lambda t: embedded(norm=replace(t.embed.norm, eps=1e-5))(t)),
    "missing embedding scale": ("ctrl-tied", embedded(scale=1.0)),
    "missing offset of sines": ("xglm-tied", positioned(FairseqSinusoidalEmbed.Config(32))),
    "wavelengths of fairseq": ("ctrl-tied", positioned(FairseqSinusoidalEmbed.Config(32))),
    "wavelengths of the paper": ("xglm-tied", positioned(SinusoidalEmbed.Config(32, offset=2))),
    "a norm of its own": ("gptj-half-rotary", standing(ParallelBlock)),
    "in sequence": ("falcon-new-grouped-two-norms", standing(PreNormBlock)),
    "side by side": ("falcon-all-kv-alibi-biased-sequential", standing(ParallelBlock)),
    "norms before sublayers": ("openai-gpt-tied", standing(PreNormBlock)),
    "no local window": ("gpt_neo-global-and-local", every_attn(window=None)),
    "local everywhere": ("gpt_neo-global-and-local", every_attn(window=5)),
    "scores scaled": ("gpt_neo-global-and-local", every_attn(scale=None)),
    "missing clip": ("mpt-untied-clipped-scaled", every_attn(clip=None)),
    "eps of queries and keys": ("persimmon-half-rotary", qk_normed(eps=1e-5)),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    right = hooked(case(name))
    model = with_tree(right, alter(right.cfg.tree))
    tokens = prompt(
        case(name), length=40
    )  # as many as there are positions: at a distance rounding of linear biases shows
    assert_apart(model(tokens), logits_of(case(name), tokens))


def trade_heads(model: HookedTransformer, name: str) -> None:
    """Two heads of one kind of weight take each other's place."""
    weight = getattr(model.blocks[0].attn, name)
    weight[:2] = weight[:2].flip(0).clone()


def trade_kinds(model: HookedTransformer, left: str, right: str) -> None:
    attn: Attention = model.blocks[0].attn
    kept = getattr(attn, left).clone()
    getattr(attn, left).copy_(getattr(attn, right))
    getattr(attn, right).copy_(kept)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("codegen-half-rotary", lambda model: trade_kinds(model, "W_K", "W_V")),
        ("codegen-two-heads-a-shard", lambda model: trade_heads(model, "W_Q")),
        ("bloom-six-heads", lambda model: trade_heads(model, "W_O")),
        ("falcon-new-grouped-two-norms", lambda model: trade_kinds(model, "W_K", "W_V")),
        ("falcon-new-grouped-two-norms", lambda model: trade_heads(model, "W_K")),
        ("gpt_bigcode-all-kv-untied", lambda model: trade_kinds(model, "W_Q", "W_K")),
        ("opt-post-norm-projected", lambda model: model.unembed.W_proj.copy_(model.embed.W_proj.T)),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedTransformer], None]):
    model = copy.deepcopy(hooked(case(name)))
    damage(model)
    assert_apart(model(prompt(case(name))), logits_of(case(name), prompt(case(name))))
