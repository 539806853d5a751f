"""Folding rewrites weights and does not change the predictions."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.components.blocks.block import MLPPart
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.weights import fold
from tests.close import LAYER, assert_close
from tests.models.structures import (
    D_MODEL,
    LAYER_NORMS,
    NORMS,
    SEEDS,
    Kinds,
    random_model,
    random_tokens,
    random_tree,
)

REWRITES = {rewrite.__name__: rewrite for rewrite in fold.FOLDS}
SOME = settings(max_examples=30)  # models are slow to build with every annotation checked
KEEP_LOGITS = [name for name in REWRITES if name != "center_unembed"]
# Nothing between queries and keys, and no fp32 inside: models that can be factored again, exactly in fp64.
PLAIN = Kinds(
    norms=(*LAYER_NORMS, "none"),
    posts=("none", "LN"),
    positions=("learned", "alibi", "none"),
    qk_norms=("none",),
    extras=("none",),
    soft_caps=(None,),
)


def log_probs(model: HookedTransformer) -> Tensor:
    with torch.no_grad():
        return model(random_tokens()).log_softmax(-1)


def logits(model: HookedTransformer) -> Tensor:
    with torch.no_grad():
        return model(random_tokens())


def can_refactor(tree: DecoderConfig) -> bool:
    return all(
        not (a.rotary or a.qk_norm or a.clip or a.v_norm or a.z_norm or a.sinks) for a in (b.attn for b in tree.blocks)
    )


def simple_tree(**changes: object) -> DecoderConfig:
    """The tree of flat names; one layer, everything learned and biased, LayerNorms."""
    flat = {
        "n_layers": 1,
        "d_model": D_MODEL,
        "n_ctx": 8,
        "n_heads": 3,
        "d_vocab": 20,
        "act_fn": "gelu",
        "device": "cpu",
    }
    return HookedTransformerConfig(**{**flat, **changes}).tree


# ---- what the model says stays -------------------------------------------------------------------------


@pytest.mark.slow
@SOME
@given(SEEDS, st.integers(0, 5))
def test_log_probs_stay(structure: int, seed: int) -> None:
    tree = random_tree(structure)
    model = random_model(tree, seed)
    before = log_probs(model)
    fold.process_weights(model, refactor_factored_attn_matrices=can_refactor(tree))
    assert_close(log_probs(model), before)


@SOME
@given(SEEDS, st.sampled_from(KEEP_LOGITS))
def test_logits_stay_but_for_centering_them(structure: int, name: str) -> None:
    tree = random_tree(structure)
    if name == "refactor_factored_attn_matrices" and not can_refactor(tree):
        return
    model = random_model(tree)
    before = logits(model)
    REWRITES[name](model)
    assert_close(logits(model), before)


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_exact_in_double_precision(structure: int) -> None:
    tree = random_tree(structure, PLAIN)
    model = random_model(tree, dtype=torch.float64)
    before = log_probs(model)
    fold.process_weights(model, refactor_factored_attn_matrices=True)
    assert_close(log_probs(model), before)


@pytest.mark.slow
@SOME
@given(SEEDS, st.permutations(sorted(REWRITES)))
@example(1247, sorted(REWRITES, key=lambda name: name != "fold_value_biases"))  # before the norms make new ones
def test_any_order_will_do(structure: int, order: list[str]) -> None:
    tree = random_tree(structure)
    model = random_model(tree)
    before = log_probs(model)
    for name in order:
        if name != "refactor_factored_attn_matrices" or can_refactor(tree):
            REWRITES[name](model)
    assert_close(log_probs(model), before)


def test_low_precision_is_rounded_once() -> None:
    exact = random_model(simple_tree(), dtype=torch.bfloat16)
    reference = copy.deepcopy(exact).to(torch.float64)
    fold.process_weights(exact)
    fold.process_weights(reference)
    for name, weight in exact.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert_close(weight, reference.state_dict()[name], depth=LAYER, dtype=torch.bfloat16)


# ---- what folded weights are like ----------------------------------------------------------------------


@SOME
@given(SEEDS)
def test_folded_norms_have_no_weights(structure: int) -> None:
    tree = random_tree(structure)
    model = random_model(tree)
    fold.fold_ln(model)
    norms = [norm_of(model, "ln_final")]
    for block in model.blocks:
        clips = block.attn.cfg.clip is not None  # what is clipped cannot be scaled beforehand
        norms += [] if tree.shortformer or clips else [block.ln1]
        if isinstance(block, MLPPart):
            norms += [block.ln2, getattr(block.mlp, "ln", nn.Identity())]
    assert [name for norm in norms for name, _ in norm.named_parameters()] == []
    assert all(not norm.cfg.weight for norm in norms if isinstance(norm, (LayerNorm, RMSNorm)))


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_centred_weights_have_mean_zero(structure: int) -> None:
    tree = random_tree(structure, Kinds(norms=LAYER_NORMS, posts=("none",), soft_caps=(None,)))
    model = random_model(tree)
    fold.process_weights(model)
    over_d_model = [model.embed.W_E]
    if tree.pos_embed is not None and not tree.shortformer:
        over_d_model.append(model.pos_embed.W_pos)
    for block in model.blocks:
        over_d_model += [block.attn.W_O, block.attn.b_O]
        over_d_model += [block.mlp.W_out, block.mlp.b_out] if isinstance(block, MLPPart) else []
    for weight in filter(lambda w: w is not None, over_d_model):
        assert_close(weight.mean(-1), 0.0, scale=weight)
    unclipped = [block.attn for block in model.blocks if block.attn.cfg.clip is None]
    readers = [attn.W_Q for attn in unclipped if not tree.shortformer] + [model.unembed.W_U]
    for weight in readers:
        assert_close(weight.mean(-2), 0.0, scale=weight)
    assert_close(model.unembed.W_U.mean(-1), 0.0, scale=model.unembed.W_U)
    if model.unembed.b_U is not None:
        assert_close(model.unembed.b_U.mean(), 0.0, scale=model.unembed.b_U)
    linear = [block.attn for block in model.blocks if block.attn.is_linear_in_values]
    assert all(attn.b_V is None or not attn.b_V.any() for attn in linear)


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_refactoring_keeps_products_and_makes_rotations(structure: int) -> None:
    tree = random_tree(structure, PLAIN)
    model = random_model(tree)
    before = copy.deepcopy(model)
    fold.refactor_factored_attn_matrices(model)
    for new, old in zip(model.blocks, before.blocks, strict=True):
        cfg = new.attn.cfg
        for head in range(cfg.n_heads):
            kv = head // (cfg.n_heads // cfg.n_kv)
            values = [block.attn.W_V[kv] @ block.attn.W_O[head] for block in (new, old)]
            scores = [block.attn.W_Q[head] @ block.attn.W_K[kv].T for block in (new, old)]
            assert_close(*values)
            assert_close(*scores)
        grouped = new.attn.W_O.unflatten(0, (cfg.n_kv, -1)).transpose(1, 2).flatten(2)
        identity = torch.eye(cfg.d_head).expand(cfg.n_kv, -1, -1)
        assert_close(grouped @ grouped.mT, identity)
        values = new.attn.W_V.mT @ new.attn.W_V
        off_diagonal = values - torch.diag_embed(values.diagonal(dim1=1, dim2=2))
        assert_close(off_diagonal, 0.0, scale=values)
        assert new.attn.b_V is None or not new.attn.b_V.any()


# ---- what is recorded ----------------------------------------------------------------------------------


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_the_config_builds_what_the_model_became(structure: int) -> None:
    tree = random_tree(structure)
    model = random_model(tree)
    fold.process_weights(model)
    again = HookedTransformer(copy.copy(model.cfg))
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert list(again.all_points()) == list(model.all_points())
    assert again.cfg.processed == model.cfg.processed


@SOME
@given(SEEDS)
def test_nothing_is_applied_twice(structure: int) -> None:
    tree = random_tree(structure)
    model = random_model(tree)
    fold.process_weights(model)
    once, recorded = copy.deepcopy(model.state_dict()), model.cfg.processed
    with torch.no_grad():
        model.embed.W_E += 1.0  # centring would take it out again
    fold.process_weights(model)
    assert "center_writing_weights" not in recorded or torch.equal(model.embed.W_E, once["embed.W_E"] + 1.0)
    rest = {name for name, weight in model.state_dict().items() if not torch.equal(weight, once[name])}
    assert rest <= {"embed.W_E", *(["unembed.W_U"] if model.cfg.tie_word_embeddings else [])}
    assert model.cfg.processed == recorded


def test_rewrites_are_recorded_in_order() -> None:
    model = random_model(simple_tree())
    fold.fold_value_biases(model)
    model.process_weights_()
    expected = ("fold_value_biases", "fold_ln", "center_writing_weights", "center_unembed")
    assert model.cfg.processed == expected
    assert model.cfg.normalization_type == "LNPre"
    assert HookedTransformerConfig.from_dict(model.cfg.to_dict()).processed == expected


def test_rms_models_say_so_and_are_not_centred() -> None:
    model = random_model(simple_tree(normalization_type="RMS", tie_word_embeddings=True))
    embedding = model.embed.W_E.detach().clone()
    model.process_weights_()
    assert model.cfg.processed == ("fold_ln", "center_unembed", "fold_value_biases")
    assert model.cfg.normalization_type == "RMSPre"
    assert torch.equal(model.embed.W_E, embedding)
    assert not model.cfg.tie_word_embeddings
    assert not model.cfg.tree.unembed.tied


def test_the_config_of_a_model_is_its_own() -> None:
    cfg = HookedTransformerConfig.from_tree(simple_tree(), device="cpu")
    HookedTransformer(cfg).process_weights_()
    assert cfg.processed == ()
    assert cfg.normalization_type == "LN"
    assert HookedTransformer(cfg).blocks[0].ln1.w is not None


def test_soft_capped_logits_are_not_centred() -> None:
    model = random_model(simple_tree(output_logits_soft_cap=5.0))
    before = model.unembed.W_U.detach().clone()
    fold.center_unembed(model)
    assert torch.equal(model.unembed.W_U, before)
    assert model.cfg.processed == ()


def test_weights_before_a_post_norm_are_not_centred() -> None:
    block = simple_tree().blocks[0]
    tree = replace(simple_tree(), blocks=(replace(block, ln1_post=NORMS["RMS"]),))
    model = random_model(tree)
    before, mlp_before = model.W_O.clone(), model.W_out.clone()
    fold.center_writing_weights(model)
    assert torch.equal(model.W_O, before)
    assert not torch.equal(model.W_out, mlp_before)


def test_refactoring_refuses_rotations() -> None:
    model = random_model(simple_tree(positional_embedding_type="rotary"))
    with pytest.raises(ValueError, match="rotates, normalises, clips or gates"):
        fold.refactor_factored_attn_matrices(model)


# ---- memory --------------------------------------------------------------------------------------------


def test_weights_stay_where_they_are_also_in_a_mapped_file(tmp_path: Path) -> None:
    model = random_model(simple_tree())
    file = tmp_path / "fused"
    torch.randn(D_MODEL, 3, 3, 4).numpy().tofile(file)  # [d_model, q k v, head, d_head], as checkpoints have it
    before = file.read_bytes()
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=len(before))
    fused = torch.empty(0, dtype=torch.float32).set_(storage).view(D_MODEL, 3, 3, 4)
    for x, part in zip("QKV", fused.unbind(1), strict=True):
        getattr(model.blocks[0].attn, f"W_{x}").data = part.transpose(0, 1)
    untouched = fused.clone()
    places = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    fold.process_weights(model, refactor_factored_attn_matrices=True)
    for name, parameter in model.named_parameters():
        if name in places and not name.startswith("unembed"):
            assert (parameter.data_ptr(), parameter.stride()) == places[name], name
    assert not torch.equal(fused, untouched)
    assert file.read_bytes() == before


def test_parameters_stay_the_same_objects_and_trainable() -> None:
    model = random_model(simple_tree())
    before = {name: parameter for name, parameter in model.named_parameters() if ".W_" in name}
    fold.process_weights(model)
    assert all(parameter is dict(model.named_parameters())[name] for name, parameter in before.items())
    model(random_tokens(), return_type="loss").backward()
    assert all(parameter.grad is not None for parameter in before.values())


# ---- dictionaries --------------------------------------------------------------------------------------


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_a_dictionary_is_loaded_and_processed(structure: int) -> None:
    tree = random_tree(structure)
    source, target = random_model(tree, 0), random_model(tree, 1)
    target.process_weights_()
    target.load_and_process_state_dict(source.state_dict(), False, False, False, False)
    assert target.cfg.processed == ()
    assert_close(logits(target), logits(source))
    target.load_and_process_state_dict(source.state_dict())
    assert_close(log_probs(target), log_probs(source))


def test_norms_that_come_back_have_the_models_dtype() -> None:
    source, target = random_model(simple_tree()), random_model(simple_tree(), 1, torch.bfloat16)
    target.process_weights_()
    target.load_and_process_state_dict(source.state_dict(), fold_ln=False)
    assert target.blocks[0].ln1.w.dtype == target.ln_final.b.dtype == torch.bfloat16
    assert target.cfg.normalization_type == "LN"
    assert "fold_ln" not in target.cfg.processed


@pytest.mark.parametrize("kind", ["LN", "RMS", "RMS, offset 1"])
def test_absent_norm_weights_are_identities(kind: str) -> None:
    block = replace(simple_tree().blocks[0], ln1=NORMS[kind])
    source, target = (random_model(replace(simple_tree(), blocks=(block,)), seed) for seed in (0, 1))
    weights = {name: w for name, w in source.state_dict().items() if ".ln1." not in name}
    target.load_and_process_state_dict(weights, False, False, False, False)
    stream = torch.randn(1, 2, D_MODEL)
    bare = replace(block.ln1, weight=False, **({"bias": False} if kind == "LN" else {})).build()
    assert_close(target.blocks[0].ln1(stream), bare(stream))


def test_a_dictionary_saved_elsewhere() -> None:
    source = random_model(simple_tree(n_key_value_heads=1))
    with torch.no_grad():
        source.blocks[0].attn.b_Q.zero_()
    theirs = dict(source.state_dict())
    for name in ("W_K", "W_V", "b_K", "b_V"):
        theirs[f"blocks.0.attn._{name}"] = theirs.pop(f"blocks.0.attn.{name}")
    del theirs["blocks.0.attn.b_Q"]
    theirs |= {f"blocks.0.attn.{name}": torch.zeros(2) for name in ("mask", "IGNORE", "rotary_sin", "rotary_cos")}
    target = random_model(simple_tree(n_key_value_heads=1), 1)
    target.load_and_process_state_dict(theirs, False, False, False, False)
    assert torch.equal(logits(target), logits(source))


def test_zero_biases_are_passed_over_and_others_made() -> None:
    block = simple_tree().blocks[0]
    no_bias = replace(block.attn, qkv_bias=False, out_bias=False)
    tree = replace(simple_tree(), blocks=(replace(block, attn=no_bias),))
    source, target = random_model(simple_tree()), random_model(tree, 1)
    with torch.no_grad():
        source.blocks[0].attn.b_O.zero_()
    target.load_and_process_state_dict(source.state_dict(), False, False, False, False)
    assert_close(logits(target), logits(source))  # a product with a bias is another kernel than one without
    assert target.blocks[0].attn.b_O is None
    assert target.cfg.tree.blocks[0].attn.qkv_bias


def test_another_unembedding_unties() -> None:
    source, target = random_model(simple_tree()), random_model(simple_tree(tie_word_embeddings=True), 1)
    target.load_and_process_state_dict(source.state_dict(), False, False, False, False)
    assert not target.cfg.tree.unembed.tied
    assert torch.equal(logits(target), logits(source))


def test_wrong_dictionaries_are_refused() -> None:
    model = random_model(simple_tree())
    weights = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.W_Q"):
        model.load_and_process_state_dict({name: w for name, w in weights.items() if not name.endswith("W_Q")})
    with pytest.raises(ValueError, match="surplus"):
        model.load_and_process_state_dict({**weights, "surplus": torch.zeros(1)})


@pytest.mark.parametrize("wrong", ["missing", "mis-shaped"])
def test_a_refused_dictionary_leaves_the_model_as_it_was(wrong: str) -> None:
    source, model = random_model(simple_tree()), random_model(simple_tree(tie_word_embeddings=True), 1)
    before, names = logits(model), list(model.state_dict())
    weights = dict(source.state_dict())
    weights["blocks.0.attn.W_O"] = weights["blocks.0.attn.W_O"][:, :-1]
    if wrong == "missing":
        del weights["blocks.0.attn.W_O"]
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.W_O'"):
        model.load_and_process_state_dict(weights)
    assert list(model.state_dict()) == names
    assert model.unembed.cfg.tied
    assert torch.equal(logits(model), before)


def test_weights_saved_elsewhere_load_as_they_are() -> None:
    model, other = random_model(simple_tree()), random_model(simple_tree(), 1)
    theirs = dict(other.state_dict())
    theirs["blocks.0.attn._W_K"] = theirs.pop("blocks.0.attn.W_K")
    theirs["blocks.0.attn.mask"], theirs["blocks.0.attn.IGNORE"] = torch.ones(3, 3), torch.tensor(-1e5)
    model.load_state_dict(theirs)
    assert torch.equal(logits(model), logits(other))
