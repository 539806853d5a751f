"""What every decoder of `tests/families/` buys: the numbers of transformers, under names that mean what they say."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.components.attention.indexer import Indexer
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Chunks
from hooked_lm.components.attention.position_scale import PositionScale
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norms.layer_norm import HeadLayerNorm
from hooked_lm.families import family, model_class, supported
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import MODEL, assert_apart, assert_close
from tests.core import CORE, thinned
from tests.families import CASES, DECODER_CASES, REFUSED, Case, reference
from tests.families._alive import Ignored, dead_sites
from tests.families._fake import assert_nothing_crosses
from tests.families._models import (
    assert_as_near_the_truth,
    assert_rows_of_patterns,
    assert_same_files,
    assert_same_gradients,
    assert_same_logits,
    assert_same_tensors,
    cached,
    expected,
    found,
    has_routes,
    hooked,
    judged_on_more_where_few_decide,
    logits_of,
    padded,
    prompt,
    recurrence,
    sharpness,
    with_tree,
)
from tests.families._sites import sites_of, sizes
from tests.unchecked import unchecked

EACH_CASE = DECODER_CASES


def test_the_table_covers_every_family():
    """At least one line each; `test_random_configs.py` draws more of every family."""
    assert {case.family for case in CASES} == set(supported())
    assert len({str(case) for case in CASES}) == len(CASES), "two cases of one name"


def test_the_class_is_the_one_that_is_listed(case: Case):
    assert type(hooked(case)).__name__ == model_class(case.family)


# ---- the same numbers ------------------------------------------------------------------------------------------------


@unchecked()
def test_logits(case: Case):
    assert_same_logits(case)


@unchecked()
def test_a_cache_does_not_change_the_logits(case: Case):
    assert_close(cached(case)[0], found(case).detach())


@unchecked()
def test_attention_is_uneven(case: Case):
    """Else a wrong order of heads or positions would hardly show."""
    _, cache = cached(case)
    for name in [name for name in cache if name.endswith("hook_pattern")][:1]:
        seen = (cache[name] > 0).sum(-1)
        assert ((cache[name].amax(-1) * seen)[seen > 1]).mean() > 1.3


@unchecked()
def test_gradients(case: Case):
    assert_same_gradients(case)


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    ours = copy.deepcopy(hooked(case)).to(torch.bfloat16)

    def compare(n_prompts: int) -> None:
        tokens = prompt(case, batch=n_prompts)
        truth, theirs = logits_of(case, tokens, torch.float64), logits_of(case, tokens, torch.bfloat16)
        assert_as_near_the_truth(ours(tokens), theirs, truth, has_routes(ours))

    judged_on_more_where_few_decide(compare, 32)


# ---- the way in and out ----------------------------------------------------------------------------------------------


@unchecked()
def test_tensors_may_come_in_any_order(case: Case, read: HookedTransformer):
    assert_same_tensors(dict(read.named_parameters()), dict(hooked(case).named_parameters()))


@unchecked()
def test_export_is_exact(
    case: Case,
    read: HookedTransformer,
    checkpoint: Path,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor],
    tmp_path: Path,
):
    """A composite cannot be written back, which is refused; `tests/hub/test_composite.py` says more about that. What is written
    is what was read; if its names are newer, it is read again."""
    if case.composite is not None:
        with pytest.raises(ValueError, match="cannot be written back: left out were"):
            read.save_pretrained(tmp_path)
        return
    read.save_pretrained(tmp_path)
    assert_same_files(tmp_path, checkpoint, weights, may_lack=family(case.family).IGNORED)
    if weights.keys() != tensors.keys():
        again = pretrained.from_pretrained_no_processing(tmp_path)
        assert_same_tensors(dict(again.named_parameters()), dict(read.named_parameters()))


@unchecked()
def test_the_model_of_transformers_comes_back(case: Case):
    if case.fields.get(
        "zero_expert_num"
    ):  # its experts do not load without weights of identity experts (longcat_flash.py)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            hooked(case).to_hf()
        return
    if case.composite is not None:
        with pytest.raises(ValueError, match="cannot be written back: left out were"):
            hooked(case).to_hf()
        return
    theirs = hooked(case).to_hf()
    theirs.set_attn_implementation(case.attention)
    theirs.config._experts_implementation = "eager"
    assert_same_tensors(theirs.state_dict(), reference(case).state_dict())
    assert torch.equal(theirs(prompt(case)).logits, expected(case)[1])


def test_what_decides_between_experts_keeps_its_precision(tmp_path: Path):
    """A bf16 checkpoint has the corrections of a router in fp32, and so has the model."""
    theirs = copy.deepcopy(reference(by_name("glm4_moe-one-group"))).bfloat16()
    for module in theirs.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.nn.Buffer(torch.rand(8) + 6)
    theirs.save_pretrained(tmp_path)
    model = pretrained.from_pretrained_no_processing(tmp_path, dtype="auto")
    mlp = model.blocks[1].mlp
    assert mlp.W_router.dtype == mlp.experts[0].W_in.dtype == torch.bfloat16
    assert mlp.b_choice.dtype == torch.float32
    assert torch.equal(mlp.b_choice, theirs.model.layers[1].mlp.gate.e_score_correction_bias)
    model.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert_same_tensors(written, load_file(tmp_path / "model.safetensors"))


ODD = (
    "glm4_moe",
    "glm4v_moe_text",
    "qwen3_omni_moe_text",
)  # by default an odd number of features is rotated, which none can


@pytest.mark.parametrize("name", supported())
def test_every_config_field_is_accounted_for(name: str):
    """Each is read, or known to have no effect, or refused when it is not at its default."""
    values, module = CONFIG_MAPPING[name]().to_dict(), family(name)
    if name == "lfm2_moe":  # without layer types transformers builds no model
        values |= {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    if name in ODD:
        values |= {"head_dim": 64}
    hf = HFConfig(values, dict.fromkeys(values, "something else"))
    module.config(hf)
    unread = set(hf.unread(getattr(module, "NO_EFFECT", ())))
    assert unread - {"is_encoder_decoder"} == REFUSED.get(name, set())


FIRST = {case.family: case for case in reversed(CASES)}


@pytest.mark.parametrize("first", thinned(FIRST.values(), keep=[FIRST[name] for name in CORE]), ids=str)
def test_a_field_that_nobody_reads_is_refused(first: Case):
    theirs = copy.deepcopy(reference(first))
    (theirs.config if first.composite is None else theirs.config.text_config).field_of_tomorrow = 4
    with pytest.raises(ValueError, match="field_of_tomorrow=4"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)


def test_a_bitnet_that_rounds_is_refused():
    theirs = copy.deepcopy(reference(by_name("bitnet-grouped")))
    theirs.config.quantization_config = {"quant_method": "bitnet", "quantization_mode": "online"}
    with pytest.raises(ValueError, match=r"rounds its weights and activations .*'online'"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)


# ---- sites -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_sites_and_their_shapes(case: Case):
    model, tree = hooked(case), hooked(case).cfg.tree
    listed = sites_of(tree)
    assert {name: " ".join(point.dims) for name, point in model.all_points().items()} == listed
    logits, cache = model.run_with_cache(prompt(case), names_filter="*")  # whose annotations are checked
    assert_close(logits, found(case).detach(), msg="with sites on demand")
    assert list(cache) == list(model.all_points()), "sites are listed in the order of computation"
    for name, value in cache.items():
        lengths = sizes(tree, name, 3, case.n_prompt)
        axes = listed[name].split()
        assert [n for n, axis in zip(value.shape, axes, strict=True) if axis != "routed"] == [
            lengths[axis] for axis in axes if axis != "routed"
        ], name


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: Case):
    """An edit of any site changes the logits. What acts through a choice of keys has many to choose from."""
    chooses = any(name.endswith("hook_index_mask") for name in hooked(case).all_points())
    assert dead_sites(hooked(case), prompt(case, batch=1, length=24 if chooses else 8)) == []


DEAD = {
    "llama-grouped": (
        "hook_embed",
        "blocks.0.ln1.hook_scale",
        "blocks.1.attn.hook_pattern",
        "blocks.1.attn.hook_result",
    ),
    "mixtral-grouped": ("blocks.0.mlp.experts.0.hook_pre", "blocks.1.mlp.experts.0.hook_out", "blocks.1.hook_q_input"),
}


@pytest.mark.parametrize(("name", "site"), [(name, site) for name in DEAD for site in DEAD[name]])
@torch.no_grad()
@unchecked()
def test_a_site_whose_value_is_ignored_is_dead(name: str, site: str):
    model = copy.deepcopy(hooked(by_name(name)))
    model.hook_dict[site].__class__ = Ignored
    assert dead_sites(model, prompt(by_name(name), batch=1, length=8)) == [site]


@unchecked()
def test_identities(case: Case):
    report = hooked(case).verify(prompt(case))
    assert report.ok, str(report)


# ---- batches and generation ------------------------------------------------------------------------------------------


@unchecked()
def test_rows_of_patterns(case: Case):
    tokens = prompt(case)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    assert_rows_of_patterns(hooked(case), tokens)
    assert_rows_of_patterns(hooked(case), tokens, attention_mask=mask)


@torch.no_grad()
@unchecked()
def test_padded_rows_are_what_they_are_alone(case: Case):
    model, rows = hooked(case), [prompt(case, batch=1, length=length)[0] for length in (12, 5, 9)]
    alone = [model(row[None])[0] for row in rows]
    for side in ("left", "right"):
        tokens, mask = padded(rows, side)
        together = model(tokens, attention_mask=mask)
        for logits, real, row in zip(together, mask.bool(), alone, strict=True):
            depth = MODEL * recurrence(case) * sharpness(case, len(row))
            assert_close(logits[real], row, depth, msg=f"padded on the {side}")


@torch.no_grad()
@unchecked()
def test_greedy_tokens_with_a_cache(case: Case):
    """Each is the one that transformers finds most likely after the tokens before it."""
    model, tokens = hooked(case), prompt(case, batch=2, length=8)
    cache = KeyValueCache(model.cfg.n_layers)
    new, logits = tokens, []
    for _ in range(16):
        logits.append(model(new, past_kv_cache=cache)[:, -1])
        new = logits[-1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    assert_close(torch.stack(logits, 1), model(tokens)[:, 7:-1], MODEL * recurrence(case) * sharpness(case, 24))
    assert torch.equal(tokens[:, 8:], logits_of(case, tokens)[:, 7:-1].argmax(-1))


# rotary angles that depend on the length, past the trained one
OF_LENGTH = (
    "falcon-all-kv-parallel-dynamic",
    "llama-dynamic",
    "phi3-longrope",
    "phimoe-another-attention-factor-beyond-the-trained-length",
)


@torch.no_grad()
@unchecked()
def test_what_follows_a_prefix_is_as_in_the_whole_prompt(case: Case):
    """Two continuations of one prefix, of different lengths, at every site; the prefix, its states too, is read in chunks."""
    model, n = hooked(case), case.n_prompt // 2
    rows = prompt(case, batch=2)
    rows[1, :n] = rows[0, :n]
    prefix = model.prefix(rows[:1, :n], chunk=None if str(case) in OF_LENGTH else 3)
    tokens, mask = padded([rows[0, n:], rows[1, n : n + 3]], "left")
    if str(case) in OF_LENGTH:
        with pytest.raises(ValueError, match="rotary angles"):
            model(prefix.then(tokens, mask))
        return
    whole, cache = model.run_with_cache(rows)
    found, of_new = model.run_with_cache(prefix.then(tokens, mask))
    depth = MODEL * recurrence(case) * sharpness(case, case.n_prompt)
    assert_close(found[0], whole[0, n:], depth)
    assert_close(found[1, -3:], whole[1, n : n + 3], depth)
    for name, value in of_new.items():
        if model.hook_dict[name].dims[:2] == ("batch", "pos"):
            assert_close(value[0], cache[name][0, n:], depth, scale=1 + cache[name].abs().max(), msg=name)


@torch.no_grad()
@unchecked()
def test_chunks_are_the_whole_run(case: Case):
    """The logits, and every site of a bare cache."""
    model, tokens = hooked(case), prompt(case)
    if str(case) in OF_LENGTH:
        with pytest.raises(ValueError, match="rotary angles"):
            model.run_with_cache(tokens, chunk=5)
        return
    logits, cache = cached(case)
    found, joined = model.run_with_cache(tokens, chunk=5)
    depth = MODEL * recurrence(case) * sharpness(case, case.n_prompt)
    assert_close(found, logits, depth)
    assert set(joined) == set(cache)
    for name, value in joined.items():
        if model.hook_dict[name].dims[0] == "batch":
            finite = cache[name].float().nan_to_num(0.0, 0.0, 0.0)
            assert torch.equal(value.isfinite(), cache[name].isfinite()), name
            scores = name.replace(
                "hook_pattern", "hook_attn_scores"
            )  # a pattern errs by up to half of what they err by
            errs = cache[scores].float().nan_to_num(0.0, 0.0, 0.0) if scores in cache else finite
            assert_close(value.float().nan_to_num(0.0, 0.0, 0.0), finite, depth, scale=1 + errs.abs().max(), msg=name)


# ---- folding ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@unchecked()
def test_folding_keeps_the_predictions(case: Case):
    folded, tokens = copy.deepcopy(hooked(case)), prompt(case)
    folded.process_weights_()
    assert folded.cfg.processed
    assert_close(folded(tokens).log_softmax(-1), found(case).detach().log_softmax(-1))
    report = folded.verify(tokens)
    assert report.ok, str(report)
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


def every_indexer(change: Callable[[Indexer.Config], dict[str, Any]]) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_attn(lambda attn: {"indexer": replace(attn.indexer, **change(attn.indexer))})  # type: ignore[attr-defined]


def every_norm(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def alter(tree: DecoderConfig) -> DecoderConfig:
        norms = {"ln1": replace(tree.blocks[0].ln1, **changes), "ln2": replace(tree.blocks[0].ln2, **changes)}
        return every_block(**norms)(tree)

    return alter


def plain_rotary(attn: Attention.Config) -> dict[str, Any]:
    return {"rotary": replace(attn.rotary, scaling=None)}


def rotary(**changes: Any) -> Callable[[Attention.Config], dict[str, Any]]:
    return lambda attn: {"rotary": replace(attn.rotary, **changes)}


def rotary_everywhere(tree: DecoderConfig) -> DecoderConfig:
    return every_attn(lambda _: {"rotary": tree.blocks[0].attn.rotary})(tree)


def norms_apart(attn: Attention.Config) -> dict[str, Any]:
    return {"qk_norm": replace(attn.qk_norm, joint=False), "k_norm": replace(attn.k_norm, joint=False)}


def norm_for_attention_alone(tree: DecoderConfig) -> DecoderConfig:
    """The MLP reads the stream as it is."""
    return replace(tree, blocks=tuple(ParallelBlock.Config(**vars(block)) for block in tree.blocks))


def mixture(tree: DecoderConfig) -> MoE.Config:
    return next(block.mlp for block in tree.blocks if isinstance(block.mlp, MoE.Config))


def every_mixture(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def alter(tree: DecoderConfig) -> DecoderConfig:
        new, old = replace(mixture(tree), **changes), mixture(tree)
        return replace(tree, blocks=tuple(replace(b, mlp=new) if b.mlp == old else b for b in tree.blocks))

    return alter


def every_router(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: every_mixture(router=replace(mixture(tree).router, **changes))(tree)


def every_expert(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: every_mixture(expert=replace(mixture(tree).expert, **changes))(tree)


BY_PAIRS = ("glm-grouped", "glm4-grouped", "helium-biased-tied", "ernie4_5-biased-untied-wide")


def own_fields(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    """The attention of the layers that have these fields, changed."""
    return every_attn(lambda attn: {name: x for name, x in changes.items() if getattr(attn, name, None) is not None})


def residuals_before_norms(tree: DecoderConfig) -> DecoderConfig:
    return replace(tree, blocks=tuple(PreNormBlock.Config(**vars(block)) for block in tree.blocks))


def clip_before_norms(tree: DecoderConfig) -> DecoderConfig:
    attn = Attention.Config(**vars(tree.blocks[0].attn))
    return every_block(attn=attn)(tree)


def weights_after_experts(tree: DecoderConfig) -> DecoderConfig:
    return every_block(mlp=MoE.Config(**vars(mixture(tree))))(tree)


SCALED = ("llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn")

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
    **{f"no scaling in {name}": (name, every_attn(plain_rotary)) for name in SCALED},
    "no longrope": ("phi3-longrope", every_attn(plain_rotary)),
    "missing offset of LayerNorm": ("nemotron-grouped", every_norm(offset=0.0)),
    "missing residual multiplier": ("granite-grouped", every_block(residual_scale=1.0)),
    "missing attention multiplier": ("granite-grouped", every_attn(lambda _: {"scale": None})),
    "missing embedding multiplier": ("granite-grouped", lambda t: replace(t, embed=replace(t.embed, scale=1.0))),
    "missing logits scaling": ("granite-grouped", lambda t: replace(t, unembed=replace(t.unembed, scale=1.0))),
    "rotary in every layer": ("smollm3-every-second-unturned", rotary_everywhere),
    "rotary in global layers": ("exaone4-hybrid", rotary_everywhere),
    "rotary in full layers beside experts": ("exaone_moe-hybrid", rotary_everywhere),
    "one base of rotary": ("granite_swa-linear-local-first", rotary_everywhere),
    "norms before rotary": ("hunyuan_v1_dense-grouped", every_attn(lambda _: {"rotary_first": False})),
    "missing alpha of rotary": ("hunyuan_v1_dense-alpha-biased-tied", every_attn(rotary(theta=500.0))),
    "rotary forwards": ("nanochat-full", every_attn(plain_rotary)),
    "norm of each head alone": ("bitnet-grouped", every_attn(lambda a: {"z_norm": replace(a.z_norm, joint=False)})),
    **{f"{name} in halves": (name, every_attn(rotary(adjacent_pairs=False))) for name in BY_PAIRS},
    "all of a head turned": ("glm-grouped", every_attn(rotary(dim=8))),
    "one expert less": ("mixtral-grouped", every_mixture(top_k=1)),
    "experts' weights as they are": ("mixtral-grouped", every_router(renormalize=False)),
    "experts' weights of sum one": ("qwen3_moe-grouped", every_router(renormalize=True)),
    "softmax of all experts": ("granitemoe-grouped", every_mixture(router=SoftmaxRouter())),
    "missing groups of experts": ("glm4_moe-grouped-qk-norm-scaled", every_router(n_groups=1, top_groups=1)),
    "missing scale of experts": ("glm4_moe-grouped-qk-norm-scaled", every_router(scale=1.0)),
    "least sum of weights": ("ernie4_5_moe-biased-one-shared-every-other", every_router(min_sum=1e-12)),
    "tolerance of the sparse mixer": ("phimoe-biased-window", every_router(tolerance=0.01)),
    "norms of each head alone": ("olmo2-grouped", every_attn(norms_apart)),
    "clip before norms": ("olmoe-clipped-after-norms", clip_before_norms),
    "residuals before norms": ("bloom-normed-residuals", residuals_before_norms),
    "missing clip": ("olmo-full-clipped", every_attn(lambda _: {"clip": None})),
    "rotary in full layers": ("cohere2-grouped-window", rotary_everywhere),
    "one rotary for all layers": ("gemma3_text-grouped-window", rotary_everywhere),
    "no rotary of their own in full layers": ("olmo3-biased-tied-two-rotaries", rotary_everywhere),
    "missing scale of logits": ("cohere-grouped", lambda t: replace(t, unembed=replace(t.unembed, scale=1.0))),
    "pairs of halves": ("cohere-grouped", every_attn(rotary(adjacent_pairs=False))),
    "norm for attention alone": ("stablelm-parallel-normed", norm_for_attention_alone),
    "norm for attention alone in phi": ("phi-half-rotary", norm_for_attention_alone),
    "all of a head turned in phi": ("phi-half-rotary", every_attn(rotary(dim=8))),
    "clamps of experts": ("gpt_oss-default-rope-tight-clamps", every_expert(limit=7.0)),
    "steps of the queries' factor": ("ministral3-yarn-steep", own_fields(position_scale=PositionScale(0.9, 4))),
    "offset of the queries' factor": (
        "llama4_text-chunks-first-second-unturned",
        own_fields(position_scale=PositionScale(0.7, 3)),
    ),
    "chunks one longer": ("llama4_text-chunks-first-second-unturned", own_fields(position_bias=Chunks(6))),
    "missing chunks": ("llama4_text-chunks-first-second-unturned", every_attn(lambda _: {"position_bias": None})),
    "weights after experts": ("llama4_text-chunks-first-second-unturned", weights_after_experts),
    "missing scale of values": ("mimo_v2_flash-narrow-values", own_fields(value_scale=1.0)),
    "alpha of experts": ("gpt_oss-default-rope-tight-clamps", every_expert(alpha=1.702)),
}


def by_name(name: str) -> Case:
    return next(case for case in DECODER_CASES if str(case) == name)


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    case = by_name(name)
    right = hooked(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert_apart(model(prompt(case)), logits_of(case, prompt(case)))


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


def drop_norm_of_mixed_values(model: HookedTransformer) -> None:
    model.blocks[0].attn.z_norm = nn.Identity()


def drop_norm_in_mlp(model: HookedTransformer) -> None:
    model.blocks[0].mlp.ln = nn.Identity()


def norm_before_sublayers(model: HookedTransformer) -> None:
    block = model.blocks[1]
    block.ln1, block.ln1_post, block.ln2, block.ln2_post = block.ln1_post, block.ln1, block.ln2_post, block.ln2


def permute_norms_of_heads(model: HookedTransformer) -> None:
    norm = model.blocks[0].attn.q_norm
    if isinstance(norm, HeadLayerNorm):
        norm.heads[0], norm.heads[1] = norm.heads[1], norm.heads[0]
    else:
        norm.w.copy_(norm.w.flip(0))


def swap_norms_by_name(model: HookedTransformer) -> None:
    block = model.blocks[0]
    block.ln1_post, block.ln2 = block.ln2, block.ln1_post


def another_activation(model: HookedTransformer) -> None:
    model.blocks[0].mlp.act_fn = nn.SiLU()


def another_slope(model: HookedTransformer) -> None:
    act = model.blocks[0].mlp.act_fn
    act.alpha_p, act.alpha_n = act.alpha_n, act.alpha_p


def swap_experts(model: HookedTransformer) -> None:
    experts = model.blocks[-1].mlp.experts
    experts[0], experts[1] = experts[1], experts[0]


def drop_correction(model: HookedTransformer) -> None:
    model.blocks[1].mlp.b_choice.zero_()


def drop_shared_expert(model: HookedTransformer) -> None:
    model.blocks[-1].mlp.shared.W_out.zero_()


def drop_sinks(model: HookedTransformer) -> None:
    model.blocks[1].attn.sinks.fill_(float("-inf"))


def drop_norm_after_experts(model: HookedTransformer) -> None:
    model.blocks[1].ln2_post = nn.Identity()


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
        ("bitnet-grouped", drop_norm_of_mixed_values),
        ("bitnet-grouped", drop_norm_in_mlp),
        ("exaone4-hybrid", norm_before_sublayers),
        ("glm4-grouped", swap_norms_by_name),
        ("olmo2-grouped", norm_before_sublayers),
        ("olmo2-grouped", permute_norms_of_heads),
        ("cohere-normed-grouped-untied", permute_norms_of_heads),
        ("stablelm-parallel-normed", permute_norms_of_heads),
        ("apertus-biased-tied", another_activation),
        ("apertus-biased-tied", another_slope),
        ("mixtral-grouped", swap_experts),
        ("gpt_oss-yarn", swap_experts),
        ("glm4_moe-one-group", drop_correction),
        ("ernie4_5_moe-tied-first-dense", drop_correction),
        ("qwen2_moe-shared", drop_shared_expert),
        ("granitemoeshared-shared", drop_shared_expert),
        ("granite_swa-two-local", drop_sinks),
        ("mimo_v2_flash-narrow-values", drop_sinks),
        ("axk1-groups", drop_norm_after_experts),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedTransformer], None]):
    case = by_name(name)
    model = copy.deepcopy(hooked(case))
    damage(model)
    assert_apart(model(prompt(case)), logits_of(case, prompt(case)))


def test_a_part_of_a_head_is_refused_where_whole_heads_turn():
    """transformers would pass over the field, and turn whole heads."""
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5: this architecture turns whole heads"):
        read_config(family("llama"), CONFIG_MAPPING["llama"](**fields))
    assert read_config(family("phi3"), CONFIG_MAPPING["phi3"](**fields)).blocks[0].attn.rotary.dim == 48


def test_nothing_crosses_between_host_and_device(case: Case):
    assert_nothing_crosses(hooked(case), case.n_prompt)
