"""What every encoder of `tests/families/` buys: the numbers of transformers, under names that mean what they say."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import ActivationCache, HookedEncoder, hub, pretrained
from hooked_lm.components.attention.position_bias import BlockSparse
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.families import model_class
from hooked_lm.models.config.tree import EncoderConfig
from tests.close import assert_apart, assert_close, is_close
from tests.core import thinned
from tests.families import ENCODER_CASES, Case, reference
from tests.families._alive import without_effect
from tests.families._encoders import Outputs, global_mask, of_transformers, ours, prompt, sizes, theirs, types
from tests.families._fake import assert_nothing_crosses
from tests.families._models import (
    MODERATE,
    assert_rows_of_patterns,
    assert_same_files,
    assert_same_gradients_of,
    assert_same_tensors,
    backpropagate,
    hooked,
    judged_on_more_where_few_decide,
    padded,
    with_tree,
)
from tests.families._sites import sites_of
from tests.unchecked import unchecked

EACH_CASE = ENCODER_CASES
RETURNED = ("logits", "nsp", "pooled", "embeddings")


def test_the_class_is_the_one_that_is_listed(case: Case):
    assert type(hooked(case)).__name__ == model_class(case.family) == "HookedEncoder"


# ---- the same numbers ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
@torch.enable_grad()
def expected(case: Case) -> tuple[Any, Outputs]:
    """A model of transformers, and what it gives for the prompt with all inputs, through which gradients flow."""
    model, tokens = theirs(case), prompt(case)
    return model, of_transformers(model, tokens, **types(case, tokens))


@lru_cache(maxsize=1)
@torch.enable_grad()
def found(case: Case) -> Outputs:
    """What our model gives for the same, through which gradients flow."""
    tokens = prompt(case)
    return ours(hooked(case), tokens, expected(case)[1], **types(case, tokens))


@lru_cache(maxsize=1)
@torch.no_grad()
def cached(case: Case) -> tuple[Tensor, ActivationCache]:
    """What our model gives for the prompt alone, and what a bare cache contains."""
    return hooked(case).run_with_cache(prompt(case))


@unchecked()
def test_everything_that_it_gives(case: Case):
    tokens = prompt(case)
    assert_same_outputs(found(case), expected(case)[1])
    if types(case, tokens):
        with torch.no_grad():
            plain = of_transformers(theirs(case), tokens)
            assert_same_outputs(ours(hooked(case), tokens, plain), plain)


def assert_same_outputs(found: Outputs, expected: Outputs) -> None:
    main = expected.get("logits", expected.get("embeddings"))
    assert main is not None
    assert MODERATE[0] < main.std() < MODERATE[1], f"the deviation is {main.std():.2g}"
    for name, value in expected.items():
        assert_close(found[name].detach(), value.detach(), msg=name)


@unchecked()
def test_a_cache_does_not_change_what_comes_out(case: Case):
    with torch.no_grad():
        assert_close(cached(case)[0], hooked(case)(prompt(case)))


@unchecked()
def test_attention_is_uneven(case: Case):
    """Else a wrong order of heads or positions would hardly show."""
    _, cache = cached(case)
    if case.family == "fnet":
        assert "blocks.0.attn.hook_pattern" not in cache
        return
    pattern = cache["pattern", 0]
    seen = (pattern > 0).sum(-1)
    assert ((pattern.amax(-1) * seen)[seen > 1]).mean() > 1.3


@unchecked()
def test_gradients(case: Case):
    """For every weight, under the name that transformers gives it: our gradients are exported as if they were weights."""
    tokens = prompt(case)
    inputs = types(case, tokens)

    def other(dtype: torch.dtype) -> Any:
        model, outputs = expected(case)
        if dtype is not torch.float32:
            model = theirs(case, dtype)
            outputs = of_transformers(model, tokens, **inputs)
        weighed_sum(outputs).backward(retain_graph=True)
        return model

    def hooked_model(dtype: torch.dtype) -> Any:
        model, outputs = hooked(case), found(case)
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
            outputs = ours(model, tokens, outputs, **inputs)
        weighed_sum(outputs).backward(retain_graph=True)
        return model

    assert_same_gradients_of(hooked_model, other)


def weighed_sum(outputs: Outputs) -> Tensor:
    """Of all numbers, weighed at random and the same for both models."""
    generator = torch.Generator().manual_seed(2)
    parts = [(out * torch.randn(out.shape, generator=generator)).sum() / len(out) for out in outputs.values()]
    return torch.stack(parts).sum()


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    """In the root mean square over everything that it gives."""
    model = copy.deepcopy(hooked(case)).to(torch.bfloat16)

    def compare(n_prompts: int) -> None:
        tokens = prompt(case, batch=n_prompts)
        truth = of_transformers(theirs(case, torch.float64), tokens)
        rough = of_transformers(theirs(case, torch.bfloat16), tokens)
        found = ours(model, tokens, truth)
        assert all(value.dtype == torch.bfloat16 for value in found.values())
        assert error(found, truth) <= 1.2 * error(rough, truth)

    judged_on_more_where_few_decide(compare, 32)


def error(found: Outputs, truth: Outputs) -> float:
    squares = [((found[name].double() - value) / value.std()).pow(2).mean() for name, value in truth.items()]
    return torch.stack(squares).mean().sqrt().item()


# ---- the way in and out ----------------------------------------------------------------------------------------------


@unchecked()
def test_tensors_may_come_in_any_order(case: Case, read: HookedEncoder):
    assert type(read) is HookedEncoder
    assert_same_tensors(read.state_dict(), hooked(case).state_dict())


@unchecked()
def test_export_is_exact(
    case: Case,
    read: HookedEncoder,
    checkpoint: Path,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor],
    tmp_path: Path,
):
    """What is written is what was read; if its names are newer, it is read again."""
    read.save_pretrained(tmp_path)
    assert_same_files(tmp_path, checkpoint, weights)
    if weights.keys() != tensors.keys():
        assert_same_tensors(HookedEncoder.from_pretrained(tmp_path).state_dict(), read.state_dict())


@unchecked()
def test_the_model_of_transformers_comes_back(case: Case):
    other = hooked(case).to_hf()
    other.set_attn_implementation(case.attention)
    assert type(other) is type(reference(case))
    assert_same_tensors(other.state_dict(), reference(case).state_dict())


# all that BERT can have at its end
VERIFIED = (
    "bert-masked",
    "bert-pretraining",
    "bert-bare",
    "bert-next-sentence",
    "bert-texts",
    "bert-tokens",
    "bert-spans",
)


@pytest.mark.parametrize("name", thinned(VERIFIED, keep=VERIFIED[:2]))
@torch.no_grad()
def test_the_hub_verifies_it(name: str, tmp_path: Path):
    reference(by_name(name)).save_pretrained(tmp_path)
    report = hub.verify(tmp_path)
    assert report.ok, str(report)
    assert any("as in transformers" in check.name for check in report.checks)


# ---- sites -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_sites_and_their_shapes(case: Case):
    model, tree = hooked(case), hooked(case).tree
    listed = sites_of(tree)
    assert {name: " ".join(point.dims) for name, point in model.all_points().items()} == listed
    _, cache = model.run_with_cache(prompt(case), names_filter="*", **global_mask(case, prompt(case)))
    assert list(cache) == list(model.all_points()), "sites are listed in the order of computation"
    for name, value in cache.items():
        lengths = sizes(tree, name, 3, case.n_prompt)
        assert list(value.shape) == [lengths[axis] for axis in listed[name].split()], name


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: Case):
    """An edit of any site changes something that comes out."""
    model, tokens = hooked(case), prompt(case, batch=2, length=8)
    names, masks = [name for name in RETURNED if can_give(model, name)], global_mask(case, tokens)

    def bend(value: Tensor, hook: Any) -> Tensor:
        if not value.is_floating_point():
            return (value + 1) % model.cfg.d_vocab
        return value * (1.5 if value.shape[-1] == 1 else torch.linspace(0.5, 1.5, value.shape[-1]))

    def ask(n: int, hooks: list[tuple[str, Any]]) -> list[Tensor]:
        given = {name: mask.repeat(n, 1) for name, mask in masks.items()}
        with model.hooks(fwd_hooks=hooks):
            return [model(tokens.repeat(n, 1), return_type=name, **given) for name in names]

    assert without_effect(model, ask, bend, least=1e-3) == []


@pytest.mark.parametrize("length", [14, 15, 31, 40])
@torch.no_grad()
def test_sparse_attention_begins_at_some_length(length: int):
    """The bias is that of the keys which transformers reads, once or repeatedly."""
    case = by_name("big_bird-masked-sparse")
    tokens = prompt(case, length=length)
    assert_close(hooked(case)(tokens), theirs(case)(tokens).logits)
    _, cache = hooked(case).run_with_cache(tokens)
    assert bool((cache["pattern", 0] == 0).any()) == (length > 14)


def test_the_language_of_an_adapter_is_one_of_the_checkpoint():
    model = copy.deepcopy(reference(by_name("xmod-masked")))
    model.config.default_language = None
    with pytest.raises(ValueError, match="default_language=None: give one of this checkpoint's, en_XX, de_DE, sw_KE"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=model)


def can_give(model: HookedEncoder, name: str) -> bool:
    needs = {"logits": model.main_head, "nsp": model.nsp_head, "pooled": model.pooler, "embeddings": model}
    return needs[name] is not None


@unchecked()
def test_identities(case: Case):
    report = hooked(case).verify(prompt(case))
    assert report.ok, str(report)


# ---- padding ---------------------------------------------------------------------------------------------------------


@unchecked()
def test_rows_of_patterns(case: Case):
    tokens = prompt(case)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    assert_rows_of_patterns(hooked(case), tokens, **types(case, tokens))
    assert_rows_of_patterns(hooked(case), tokens, attention_mask=mask)


@torch.no_grad()
@unchecked()
def test_padded_rows_are_what_they_are_alone(case: Case):
    model, rows = hooked(case), [prompt(case, batch=1, length=length)[0] for length in (12, 5, 9)]
    for name in RETURNED:
        if not can_give(model, name):
            continue
        alone = [model(row[None], return_type=name)[0] for row in rows]
        for side in ("left", "right"):
            tokens, mask = padded(rows, side)
            together = model(tokens, return_type=name, attention_mask=mask)
            for out, real, row in zip(together, mask.bool(), alone, strict=True):
                of_tokens = out[real] if together.shape[:2] == tokens.shape else out
                assert_close(of_tokens, row, msg=f"{name}, padded on the {side}")


@torch.no_grad()
@unchecked()
def test_padded_rows_are_those_of_transformers(case: Case):
    """On the right, where all families of transformers keep positions; where it reads padding, the row is that alone."""
    config, tokens = reference(case).config, prompt(case)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = mask[2, 9:] = 0
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    tokens = tokens.where(mask.bool(), torch.tensor(pad))
    expected = of_transformers(theirs(case), tokens, attention_mask=mask)
    alone = of_transformers(theirs(case), tokens[1:2, :5])
    for name, value in ours(hooked(case), tokens, expected, attention_mask=mask).items():
        per_token = value.shape[:2] == tokens.shape
        if reads_padding(case):
            row = (1, slice(5)) if per_token else 1
            assert_close(value[row], alone[name][0])
            assert_apart(expected[name][row], alone[name][0])
        else:
            real = mask.bool() if per_token else slice(None)
            assert_close(value[real], expected[name][real])


def reads_padding(case: Case) -> bool:
    """Whether transformers gives a padded row something else than the row alone.

    `BigBirdModel.forward` counts blocks up to the end of the longest row, so that the last may be padding.
    `ConvBertSelfAttention.forward` convolves padding, and `MobileBertEmbeddings.forward` joins a token with the padding after it.
    `FNetEncoder.forward` has no mask.
    """
    tree = hooked(case).tree
    bias = getattr(getattr(tree.blocks[0], "attn", None), "position_bias", None)
    if isinstance(bias, BlockSparse):
        return case.n_prompt > bias.longest_full
    return case.family in ("convbert", "fnet") or getattr(tree.embed.embed, "trigram", False)


# ---- the comparison can fail -----------------------------------------------------------------------------------------

Alter = Callable[[EncoderConfig], EncoderConfig]


def every_attn(**changes: Any) -> Alter:
    return lambda tree: replace(tree, blocks=tuple(replace(b, attn=replace(b.attn, **changes)) for b in tree.blocks))


def every_block(**changes: Any) -> Alter:
    return lambda tree: replace(tree, blocks=tuple(replace(b, **changes) for b in tree.blocks))


def every_norm(tree: EncoderConfig) -> EncoderConfig:
    norm = replace(tree.blocks[0].ln2, eps=1e-5)
    return every_block(ln1=norm, ln2=norm)(tree)


def embedding(**changes: Any) -> Alter:
    return lambda tree: replace(tree, embed=replace(tree.embed, **changes))


def windows(tree: EncoderConfig) -> EncoderConfig:
    """One longer wherever there is one."""
    attns = [replace(b.attn, window=b.attn.window and b.attn.window + 1) for b in tree.blocks]
    return replace(tree, blocks=tuple(replace(b, attn=a) for b, a in zip(tree.blocks, attns, strict=True)))


def one_theta(tree: EncoderConfig) -> EncoderConfig:
    return every_attn(rotary=tree.blocks[0].attn.rotary)(tree)


def other_buckets(tree: EncoderConfig) -> EncoderConfig:
    return replace(tree, rel_embed=replace(tree.rel_embed, max_distance=12))


def unnormed_table(tree: EncoderConfig) -> EncoderConfig:
    return replace(tree, rel_embed=replace(tree.rel_embed, norm_eps=1e-5))


def unscaled_masks(tree: EncoderConfig) -> EncoderConfig:
    cfg = tree.embed
    return replace(tree, embed=EncoderEmbed.Config(cfg.embed, cfg.pos_embed, cfg.token_type_embed, cfg.norm))


def head(**changes: Any) -> Alter:
    return lambda tree: replace(tree, mlm_head=replace(tree.mlm_head, **changes))


def pooling(**changes: Any) -> Alter:
    return lambda tree: replace(tree, pooler=replace(tree.pooler, **changes))


WRONG_TREES: dict[str, tuple[str, Alter]] = {
    "eps": ("bert-masked", every_norm),
    "eps of the embeddings' norm": (
        "bert-masked",
        lambda tree: embedding(norm=replace(tree.embed.norm, eps=1e-5))(tree),
    ),
    "eps of the head's norm": ("bert-masked", lambda tree: head(norm=replace(tree.mlm_head.norm, eps=1e-5))(tree)),
    "activation": ("bert-masked", lambda t: every_block(mlp=replace(t.blocks[0].mlp, act_fn="relu"))(t)),
    "activation of the head": ("bert-masked", head(act_fn="relu")),
    "activation of the pooler": ("bert-bare", pooling(act_fn="relu")),
    "activation of the other pooler": ("electra-texts-narrow", pooling(act_fn="tanh")),
    "scale of scores": ("bert-masked", every_attn(scale=1.0)),
    "causal": ("bert-masked", every_attn(causal=True)),
    "one window longer": ("modernbert-masked", windows),
    "one theta for all layers": ("modernbert-masked", one_theta),
    "first token for mean": ("modernbert-texts-mean", pooling(mean=False)),
    "mean for first token": ("modernbert-texts-first", pooling(mean=True)),
    "pooling before the activation": ("eurobert-texts-late", pooling(pools_last=False)),
    "default theta": ("nomic_bert-masked", every_attn(rotary=Rotary(8))),
    "norm after the embeddings": (
        "roberta-prelayernorm-masked",
        lambda t: embedding(norm=replace(t.ln_final, eps=2.0))(t),
    ),
    "scale of two scores": ("deberta-masked-untied-c2p-types", every_attn(scale=8**-0.5)),
    "masks that count": ("esm-masked-token-dropout", unscaled_masks),
    "share of masks in training": ("esm-masked-token-dropout", embedding(trained_share=0.15)),
    "scale of three scores": ("deberta-v2-masked", every_attn(scale=8**-0.5)),
    "one window longer in Longformer": ("longformer-masked-windows", windows),
    "one window longer in UltraBERT": ("ultrabert-masked", windows),
    "norm of the adapter's input": ("xmod-masked", every_block(reuses_ln2=False)),
    "sum of the adapter": ("xmod-masked", every_block(adds_normalized=False)),
    "scale of the sublayers": ("esmc-masked", every_block(residual_scale=1.0)),
    "share of the Fourier transform": ("fnet-masked", every_block(mid_weights=(1.0, 0.5))),
    "positions of cells": ("tapas-masked", lambda t: replace(t, embed=EncoderEmbed.Config(**vars(t.embed)))),
    "one random block more": ("big_bird-masked-sparse", every_attn(position_bias=BlockSparse(2, 2))),
    "no random block": ("big_bird-masked-sparse", every_attn(position_bias=BlockSparse(2, 0))),
    "blocks one longer": ("big_bird-bare-sparse-unbiased", every_attn(position_bias=BlockSparse(2, 0))),
    "scale of the embeddings": (
        "big_bird-pretraining-scaled-untied",
        lambda t: embedding(embed=replace(t.embed.embed, scale=1.0))(t),
    ),
    "activation of the inner head": ("ultrabert-masked", head(act_fn="relu")),
    "buckets": ("deberta-v2-masked-shared-buckets-normed", other_buckets),
    "eps of the table's norm": ("deberta-v2-masked-shared-buckets-normed", unnormed_table),
    "activation of the convolution": (
        "deberta-v2-masked-new-head-conv",
        lambda t: replace(t, blocks=(replace(t.blocks[0], conv_act_fn="tanh"), *t.blocks[1:])),
    ),
}


def by_name(name: str) -> Case:
    return next(case for case in ENCODER_CASES if str(case) == name)


def agrees(model: HookedEncoder, case: Case) -> bool:
    """Whether it gives what transformers gives."""
    tokens = prompt(case)
    inputs = types(case, tokens)
    with torch.no_grad():
        expected = of_transformers(theirs(case), tokens, **inputs)
        found = ours(model, tokens, expected, **inputs)
    return all(is_close(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    case = by_name(name)
    right = hooked(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert agrees(right, case)
    assert not agrees(model, case)


def negate(model: HookedEncoder) -> None:
    model.blocks[1].attn.W_O.neg_()


def swap_queries_and_keys(model: HookedEncoder) -> None:
    attn = model.blocks[0].attn
    attn.W_Q, attn.W_K = attn.W_K, attn.W_Q


def swap_position_projections(model: HookedEncoder) -> None:
    attn = model.blocks[0].attn
    attn.W_pos_Q, attn.W_pos_K = attn.W_pos_K, attn.W_pos_Q


def reverse_distances(model: HookedEncoder) -> None:
    model.rel_embed.W_rel.copy_(model.rel_embed.W_rel.flip(0))


def permute_heads(model: HookedEncoder) -> None:
    model.blocks[0].attn.W_Q.copy_(model.blocks[0].attn.W_Q.flip(0))


def shift_positions(model: HookedEncoder) -> None:
    table = model.embed.pos_embed.W_pos
    table.copy_(table.roll(1, 0))


def drop_types(model: HookedEncoder) -> None:
    model.embed.token_type_embed.W_token_type.zero_()


def drop_bias_of_distances(model: HookedEncoder) -> None:
    model.rel_pos_bias.W_rel.zero_()


def swap_gate_and_linear(model: HookedEncoder) -> None:
    mlp = model.blocks[0].mlp
    mlp.W_gate, mlp.W_in = mlp.W_in, mlp.W_gate


def norms_before(model: HookedEncoder) -> None:
    block = model.blocks[0]
    block.ln1, block.ln2 = block.ln2, block.ln1


def drop_final_norm(model: HookedEncoder) -> None:
    model.ln_final = nn.Identity()


def drop_bias_of_unembedding(model: HookedEncoder) -> None:
    assert isinstance(model.unembed, Unembed)
    model.unembed.b_U.zero_()


def drop_pooler(model: HookedEncoder) -> None:
    model.pooler.b.zero_()


def flip_convolution(model: HookedEncoder) -> None:
    model.blocks[0].W_conv.copy_(model.blocks[0].W_conv.flip(0))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("bert-masked", negate),
        ("bert-masked", swap_queries_and_keys),
        ("bert-masked", shift_positions),
        ("bert-masked", drop_types),
        ("bert-masked", permute_heads),
        ("bert-masked", norms_before),
        ("bert-pretraining", drop_pooler),
        ("bert-texts", drop_pooler),
        ("roberta-masked", shift_positions),
        ("distilbert-masked", swap_queries_and_keys),
        ("electra-masked-narrow", drop_bias_of_unembedding),
        ("albert-masked-narrow", negate),
        ("mpnet-masked", drop_bias_of_distances),
        ("modernbert-masked", swap_gate_and_linear),
        ("modernbert-masked", permute_heads),
        ("esm-masked-rotary", drop_final_norm),
        ("deberta-v2-masked", swap_position_projections),
        ("deberta-v2-masked", reverse_distances),
        ("deberta-v2-bare-conv-groups", flip_convolution),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedEncoder], None]):
    case = by_name(name)
    model = copy.deepcopy(hooked(case))
    damage(model)
    assert not agrees(model, case)


def test_backpropagation_reaches_every_weight_but_the_unread():
    """The random weighing of the gradient test leaves nothing out."""
    model = copy.deepcopy(hooked(by_name("bert-masked")))
    backpropagate(model(prompt(by_name("bert-masked"))))
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_nothing_crosses_between_host_and_device(case: Case):
    assert_nothing_crosses(hooked(case), case.n_prompt)
