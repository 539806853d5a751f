"""What is particular to Hy4: hyper-connections between several residual streams, and the names of its tensors."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from hooked_lm import pretrained
from hooked_lm.analysis.reading.lens import logit_lens
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.experts.moe import MoE
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import hy_v4
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.patching import Edit, Experiment
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive
from tests.families import reference, streams
from tests.families._models import assert_same_tensors, distance, every_block, hooked, logits_of, prompt, with_tree

CASES = {case.name: case for case in streams.CASES if case.family == "hy_v4"}
SHARED, BIASED = CASES["shared-keys-groups"], CASES["two-streams-yarn-biased-tied-gelu"]
MODEL = hooked(SHARED)


# ---- the comparison with transformers can fail -----------------------------------------------------------------------


def index_first(block: Any) -> dict[str, Any]:
    if not isinstance(block.attn, SparseLatentAttention.Config):
        return {}
    return {"attn": replace(block.attn, indexer=replace(block.attn.indexer, rotary_last=False))}


def experts(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def changed(block: Any) -> dict[str, Any]:
        is_sparse = isinstance(block.mlp, MoE.Config)
        return {"mlp": replace(block.mlp, expert=replace(block.mlp.expert, **changes))} if is_sparse else {}

    return every_block(changed)


def connection(part: str, **changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_block(lambda block: {"hc": replace(block.hc, **{part: replace(getattr(block.hc, part), **changes)})})


WRONG_TREES = {
    "rotary on the first features of the index": (SHARED, every_block(index_first)),
    "bounds after the activation": (SHARED, experts(before_act=False)),
    "other bounds": (SHARED, experts(limit=0.6)),
    "experts with the activation of the MLPs": (BIASED, experts(act_fn="gelu")),
    "another magnitude": (SHARED, connection("write", magnitude=1.0)),
    "the magnitude of what is written for what is read": (SHARED, connection("read", magnitude=1.4)),
    "no eps of the gates": (BIASED, connection("read", eps=0.0)),
    "a smaller eps of their norm": (SHARED, connection("read", norm_eps=1e-6)),
    "no eps of the last gate": (BIASED, lambda tree: replace(tree, ln_final=replace(tree.ln_final, gate_eps=0.0))),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    case, alter = WRONG_TREES[wrong]
    right, tokens = hooked(case), prompt(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(case, tokens)) > 1e-3


@pytest.mark.parametrize("part", ["attn_hc.read", "attn_hc.write", "mlp_hc.read", "mlp_hc.write"])
@torch.no_grad()
def test_wrong_weights_are_noticed(part: str) -> None:
    tokens = prompt(SHARED)
    for name, axes in (("W", (0, 2)), ("b", (0,)), ("scale", None)):
        model = copy.deepcopy(MODEL)
        weight = model.get_parameter(f"blocks.1.{part}.{name}")
        weight.copy_(weight.transpose(*axes).clone() if name == "W" else weight.roll(1) if axes else -weight)
        assert distance(model(tokens), logits_of(SHARED, tokens)) > 1e-3, name


@torch.no_grad()
def test_layers_share_the_chosen_keys() -> None:
    _, cache = MODEL.run_with_cache(prompt(SHARED))
    assert isinstance(MODEL.blocks[1].attn, SharedIndexAttention)
    assert torch.equal(cache["blocks.1.attn.hook_index_mask"], cache["blocks.0.attn.indexer.hook_index_mask"])


def test_weights_of_connections_stay_in_fp32() -> None:
    model = copy.deepcopy(MODEL).to(torch.bfloat16)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert {name for name in kept if "_hc." in name or name.startswith("ln_final.gate.")} == {
        name for name, _ in model.named_parameters() if "_hc." in name or name.startswith("ln_final.gate.")
    }
    assert model.blocks[0].ln1.w.dtype == torch.bfloat16


# ---- names -----------------------------------------------------------------------------------------------------------


def published(name: str) -> str:
    """As the checkpoint's names are before the renaming of transformers, by its table."""
    name = re.sub(r"\.hc_pre\.hc_(attn|mlp)_layer\.hc_", r".hc_\1_layer.hc_pre.hc_", name)
    name = name.replace(".hc_pre.hc_head.hc_head_", ".hc_head.hc_pre.hc_head_")
    return re.sub(r"(mlp(?:\.shared_experts)?)\.linear_gate", r"\1.gate_proj", name)


def of_modules(name: str) -> str:
    name = re.sub(r"\.hc_pre\.hc_attn_layer\.hc_", ".attn_hc.", name)
    name = re.sub(r"\.hc_pre\.hc_mlp_layer\.hc_", ".ffn_hc.", name)
    name = name.replace(".hc_pre.hc_head.hc_head_", ".hc_head.hc_").replace("linear_gate", "gate_proj")
    return name.replace("learnable_sink_param", "sinks")


@pytest.mark.parametrize("spelled", [published, of_modules])
@torch.no_grad()
def test_other_names_load(spelled: Callable[[str], str], tmp_path: Path) -> None:
    reference(SHARED).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {spelled(name): value for name, value in tensors.items()}
    assert len(renamed) == len(tensors)
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert_same_tensors(dict(model.named_parameters()), dict(MODEL.named_parameters()))


def test_bounds_of_zero_are_refused() -> None:
    values = CONFIG_MAPPING["hy_v4"](**copy.deepcopy(SHARED.fields)).to_dict() | {"swiglu_limit": 0.0}
    with pytest.raises(ValueError, match=r"swiglu_limit=0.0 is not supported"):
        hy_v4.config(HFConfig(values, {}))


# ---- streams ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_stream_before_the_first_layer_is_the_embedding() -> None:
    _, cache = MODEL.run_with_cache(prompt(SHARED))
    assert_close(cache["resid_pre", 0], cache["hook_embed"])
    assert_close(cache["resid_mid", 1], cache["streams_mid", 1].mean(2))


@torch.no_grad()
def test_an_edit_of_the_mean_is_added_to_each_stream() -> None:
    tokens = prompt(SHARED)
    generator = torch.Generator().manual_seed(5)
    change = torch.randn(MODEL.cfg.d_model, generator=generator)
    found = []
    for layer, place in ((1, "pre"), (0, "post")):
        for name, added in (("resid", change), ("streams", change)):
            edit = (f"blocks.{layer}.hook_{name}_{place}", lambda value, hook, added=added: value + added)
            found.append(MODEL.run_with_hooks(tokens, fwd_hooks=[edit]))
    assert_apart(found[0], MODEL(tokens))
    for other in found[1:]:
        assert_close(other, found[0])


@torch.no_grad()
def test_a_recorded_mean_changes_no_bit() -> None:
    tokens = prompt(SHARED)
    logits, _ = MODEL.run_with_cache(tokens, names_filter=lambda name: "resid" in name)
    assert torch.equal(logits, MODEL(tokens))


@torch.no_grad()
def test_a_run_goes_on_with_all_streams() -> None:
    tokens = prompt(SHARED)
    for layer in (0, 2, 3):  # layer 1 attends to the keys that layer 0 chooses
        resid = MODEL(tokens, stop_at_layer=layer)
        assert resid.shape[-1] == MODEL.cfg.d_model * (3 if layer else 1)
        assert torch.equal(MODEL(resid, start_at_layer=layer), MODEL(tokens))
    with pytest.raises(ValueError, match=r"expected all 3 residual streams, \[batch, pos, 96\]"):
        MODEL(torch.zeros(1, 4, 32), start_at_layer=2)


@torch.no_grad()
def test_sweeps_take_the_incremental_path() -> None:
    tokens, other = prompt(SHARED, batch=2), prompt(SHARED, batch=4)[2:]
    _, cache = MODEL.run_with_cache(other)
    names = ("hook_resid_pre", "hook_streams_mid", "attn_hc.hook_write", "mlp_hc.hook_out", "hook_resid_post")
    cells = [
        [Edit(f"blocks.{i}.{n}", cache[f"blocks.{i}.{n}"], (pos,))] for i in (0, 2) for n in names for pos in (2, 9)
    ]
    seen: dict[int, Tensor] = {}
    experiment = Experiment(MODEL, tokens, [lambda logits: logits[:, -1, 3] - logits[:, -2, 5]])
    for index, scores in experiment.run(cells, progress=False):
        seen[index] = scores[0]
    assert experiment.cost.forwards == 1, "the base run"
    for index, cell in enumerate(cells):
        logits = naive(MODEL, tokens, cell)
        assert_close(seen[index], logits[:, -1, 3] - logits[:, -2, 5])


@torch.no_grad()
def test_the_lens_merges_the_streams() -> None:
    tokens = prompt(SHARED)
    logits, cache = MODEL.run_with_cache(tokens)
    found = logit_lens(MODEL, tokens, site="streams_post", k=3)
    assert_close(found.logits[-1], logits.topk(3).values.transpose(0, 1))
    for refused in (
        lambda: logit_lens(MODEL, cache),
        cache.decompose_resid,
        cache.accumulated_resid,
        lambda: cache.logit_attrs(cache["attn_out", 0][None], 5),
    ):
        with pytest.raises(ValueError, match="this model has 3 residual streams"):
            refused()
