"""Runs in each of two gloo processes: a whole model beside one that is split, and every check of `CHECKS` on both."""

import copy
import json
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.parallel import full_state_dict, local, local_values, tensor_parallel
from hooked_lm.patching import get_act_patch_attn_head_out_all_pos
from tests.close import GRADIENT, assert_close

WORLD = 2
SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "d_mlp": 24, "d_vocab": 30, "n_ctx": 16, "seed": 0}
ROTARY = {
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "normalization_type": "RMS",
    "act_fn": "silu",
    "gated_mlp": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"act_fn": "gelu_new"},
    "grouped": {"n_key_value_heads": 2, "use_qk_norm": True, "use_attention_sinks": True, **ROTARY},
    "one_kv_head": {"n_key_value_heads": 1, "use_qk_norm": True, **ROTARY},
    "joint_norm": ROTARY,  # of queries, over all heads together
    "alibi": {"act_fn": "relu", "positional_embedding_type": "alibi", "parallel_attn_mlp": True},
    "mixture": {"n_key_value_heads": 2, "num_experts": 4, "experts_per_token": 2, **ROTARY},
}  # fmt: skip


class Pair(NamedTuple):
    whole: HookedTransformer
    split: HookedTransformer
    tokens: Tensor
    rank: int


def build(name: str) -> HookedTransformer:
    cfg = HookedTransformerConfig(**{**SIZES, "initializer_range": 0.3, "device": "cpu", **MODELS[name]})
    model = HookedTransformer(with_joint_norms(cfg) if name == "joint_norm" else cfg).double()
    with torch.no_grad():
        for i, (weight_name, weight) in enumerate(model.named_parameters()):
            if ".W_" not in weight_name:  # biases and norms too
                weight += 0.2 * torch.randn(
                    weight.shape, generator=torch.Generator().manual_seed(i), dtype=weight.dtype
                )
    return model


def with_joint_norms(cfg: HookedTransformerConfig) -> HookedTransformerConfig:
    """The config of a model that normalises its queries over all heads together, as OLMo 2 does, and keys head by head."""

    def normed(attn: Any) -> Any:
        joint = RMSNorm.Config(attn.d_head, n_heads=attn.n_heads, joint=True)
        return replace(attn, qk_norm=joint, k_norm=replace(joint, n_heads=attn.n_kv, joint=False))

    blocks = tuple(replace(block, attn=normed(block.attn)) for block in cfg.tree.blocks)
    return HookedTransformerConfig.from_tree(
        replace(cfg.tree, blocks=blocks), device="cpu", seed=0, initializer_range=0.3
    )


def close(found: Tensor, expected: Tensor, what: str) -> None:
    # the gradient of a key's bias is a sum of large terms that is zero
    largest = max([1.0, *expected.abs().flatten().tolist()])
    assert_close(found, expected, GRADIENT, scale=largest, msg=what)


def all_sites(model: HookedTransformer) -> list[str]:
    """Every site, those on demand too; of experts those of the first and the last."""
    sites = [name for name in model.all_points() if name != "hook_tokens"]
    assert any(name.endswith("hook_result") for name in sites), sites
    return [name for name in sites if ".experts." not in name or ".experts.0." in name or ".experts.3." in name]


def check_logits(pair: Pair) -> None:
    with torch.no_grad():
        close(pair.split(pair.tokens), pair.whole(pair.tokens), "logits")


def check_memory(pair: Pair) -> None:
    """Each rank has half of the weights that are split."""
    blocks = [sum(p.numel() for p in model.blocks[0].parameters()) for model in (pair.split, pair.whole)]
    assert blocks[0] < 0.62 * blocks[1], blocks


def check_cache(pair: Pair) -> None:
    """Every site, those on demand too, with and without gradients."""
    sites = all_sites(pair.whole)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            logits, cache = pair.split.run_with_cache(pair.tokens, names_filter=sites)
            expected, whole = pair.whole.run_with_cache(pair.tokens, names_filter=sites)
        close(logits, expected, "logits")
        assert set(cache) == set(whole)
        for site in whole:
            close(cache[site], whole[site], site)
    bare, whole_bare = pair.split.run_with_cache(pair.tokens)[1], pair.whole.run_with_cache(pair.tokens)[1]
    assert list(bare) == list(whole_bare)


def scaled(value: Tensor, hook: Any) -> Tensor | None:
    """An edit of a part of the value that depends on all of it, and differs along each axis."""
    if not value.is_floating_point():
        return None
    ramp = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
    return value * ramp + 0.1 * value.mean() if hook.name.rpartition(".")[2] != "hook_attn_scores" else value * ramp


def check_edits(pair: Pair) -> None:
    """An edit at each site gives the logits and the gradients of the single process."""
    for site in [name for name in all_sites(pair.whole) if not name.startswith("blocks.1.")]:
        found = []
        for model in (pair.split, pair.whole):
            model.zero_grad()
            with model.hooks([(site, scaled)]):
                loss = model(pair.tokens, return_type="loss")
            loss.backward()
            found.append((loss.detach(), model.embed.W_E.grad, model.blocks[0].ln1.w.grad))
        for got, expected in zip(*found, strict=True):
            close(got, expected, f"edit at {site}")


def check_weight_gradients(pair: Pair) -> None:
    """Gradients of replicated weights are whole, those of split weights are the slices."""
    for model in (pair.split, pair.whole):
        model.zero_grad()
        model(pair.tokens, return_type="loss").backward()
    own, whole = dict(pair.split.named_parameters()), dict(pair.whole.named_parameters())
    assert own.keys() == whole.keys()
    for name, weight in own.items():
        expected = whole[name].grad
        if expected is None:  # of an expert without tokens
            assert weight.grad is None, name
        elif weight.shape == expected.shape:
            close(weight.grad, expected, name)
        elif weight.numel():
            [axis] = [i for i, (n, m) in enumerate(zip(weight.shape, expected.shape, strict=True)) if n != m]
            close(weight.grad, expected.chunk(WORLD, axis)[pair.rank], name)


def check_site_gradients(pair: Pair) -> None:
    """Backward hooks see and edit the whole gradient, at every site."""
    sites = [s for s in all_sites(pair.whole) if not s.endswith(("routed_positions", "expert_indices"))]
    found = []
    for model in (pair.split, pair.whole):
        model.zero_grad()
        _, cache = model.run_with_cache(pair.tokens, names_filter=sites, incl_bwd=True, return_type="loss")
        found.append({name: value for name, value in cache.items() if name.endswith("_grad")})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 20
    for name, expected in found[1].items():
        close(found[0][name], expected, name)
    for site in ("blocks.1.attn.hook_z", "blocks.1.mlp.hook_out", "blocks.0.attn.hook_k", "blocks.0.attn.hook_pattern"):
        gradients = []
        for model in (pair.split, pair.whole):
            model.zero_grad()
            with model.hooks(bwd_hooks=[(site, scaled)]):
                model(pair.tokens, return_type="loss").backward()
            gradients.append(model.embed.W_E.grad)
        close(gradients[0], gradients[1], f"edited gradient at {site}")


def check_second_gradients(pair: Pair) -> None:
    found = []
    for model in (pair.split, pair.whole):
        embed = model.embed.W_E
        model.add_hook(
            "blocks.*.attn.hook_pattern", lambda value, hook: None
        )  # the fused kernel has no second gradient
        [first] = torch.autograd.grad(model(pair.tokens, return_type="loss"), embed, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), embed)[0])
        model.reset_hooks()
    close(found[0], found[1], "gradient of the gradient")


def check_frozen(pair: Pair) -> None:
    """Gradients at a site of a model whose weights are frozen."""
    found = []
    for model in (pair.split, pair.whole):
        model.requires_grad_(False)
        kept: dict[str, Tensor] = {}
        with model.hooks(
            [("blocks.0.hook_resid_pre", lambda value, hook: value.requires_grad_())],
            [("blocks.0.attn.hook_q", lambda gradient, hook, kept=kept: kept.update(q=gradient))],
        ):
            model(pair.tokens, return_type="loss").backward()
        found.append(kept["q"])
        model.requires_grad_(True)
    close(found[0], found[1], "gradient at q")


def check_generation(pair: Pair) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}
    for use_cache in (True, False):
        made = [
            model.generate(pair.tokens[:, :4], use_past_kv_cache=use_cache, **options)
            for model in (pair.split, pair.whole)
        ]
        assert torch.equal(*made), made
    padded = torch.ones_like(pair.tokens).index_fill(1, torch.tensor([0]), 0)
    with torch.no_grad():
        close(*(m(pair.tokens, attention_mask=padded) for m in (pair.split, pair.whole)), "logits of padded prompts")


def check_local_hooks(pair: Pair) -> None:
    """A local hook sees this rank's part; full and local hooks at one site follow each other."""
    shapes: dict[str, torch.Size] = {}

    def see(value: Tensor, hook: Any) -> None:
        shapes[hook.name] = value.shape

    def add_rank(value: Tensor, hook: Any) -> Tensor:
        return value + pair.rank

    z, post = "blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern"
    with torch.no_grad(), pair.split.hooks([local((z, see)), local((post, see))]):
        pair.split(pair.tokens)
    assert (shapes[z][2], shapes[post][1]) == (2, 2), shapes

    def add_to_second_half(value: Tensor, hook: Any) -> Tensor:
        return value + torch.tensor([0, 0, 1, 1])[:, None]

    with torch.no_grad():
        with pair.split.hooks([(z, scaled), local((z, add_rank)), (z, scaled), local((z, see))]):
            found = pair.split(pair.tokens)
        with pair.whole.hooks([(z, scaled), (z, add_to_second_half), (z, scaled)]):
            close(found, pair.whole(pair.tokens), "full and local hooks in turn")
    with local_values():
        _, cache = pair.split.run_with_cache(pair.tokens)
    assert cache["z", 0].shape[2] == 2
    seen: list[str] = []
    for direction in (
        local(lambda g, hook: seen.append(f"local {g.shape[2]}")),
        lambda g, hook: seen.append(f"full {g.shape[2]}"),
    ):
        pair.split.add_hook(z, direction, dir="bwd")
    pair.split(pair.tokens, return_type="loss").backward()
    pair.split.reset_hooks()
    assert seen == ["local 2", "full 4"], seen


def check_ungrouped(pair: Pair) -> None:
    found = []
    for model in (pair.split, pair.whole):
        if model.cfg.n_key_value_heads is None:
            return
        model.set_ungroup_grouped_query_attention(True)
        with torch.no_grad():
            found.append(model.run_with_cache(pair.tokens, names_filter=[f"blocks.0.attn.hook_{x}" for x in "kvz"])[1])
        model.set_ungroup_grouped_query_attention(False)
    for site in found[1]:
        close(found[0][site], found[1][site], site)


def check_training(pair: Pair) -> None:
    """Steps of an optimiser on all ranks are those of the single process; the weights are gathered afterwards."""
    whole, split = copy.deepcopy(pair.whole), tensor_parallel(copy.deepcopy(pair.whole))
    for model in (whole, split):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            model(pair.tokens, return_type="loss").backward()
            optimiser.step()
    state = full_state_dict(split)
    for name, weight in whole.named_parameters():
        close(state[name], weight.detach(), name)
    again = copy.deepcopy(pair.whole)
    again.load_state_dict(state)
    with torch.no_grad():
        close(again(pair.tokens), whole(pair.tokens), "logits of gathered weights")


def check_refusals(pair: Pair) -> None:
    """What would read or write a part as if it were the whole is refused, and names what it is about."""
    split = pair.split
    for refused, words in [
        (lambda: split.W_Q, "W_Q of SplitAttention is split over 2 ranks"),
        (lambda: split.blocks[0].attn.OV, "is split over 2 ranks"),
        (lambda: split.process_weights_(), "is split over 2 ranks"),
        (lambda: split.state_dict(), "full_state_dict"),
        (lambda: copy.deepcopy(split), "cannot be copied"),
        (lambda: pickle.dumps(split), "cannot be pickled"),
        (lambda: tensor_parallel(split), "split already"),
    ]:
        refuses(refused, words)
    z = split.blocks[0].attn.hook_z
    handle = z.register_forward_hook(lambda *_: None)
    refuses(lambda: split(pair.tokens), "blocks.0.attn.hook_z' is split over 2 ranks and has a hook of PyTorch")
    handle.remove()
    with torch.no_grad():
        close(split(pair.tokens), pair.whole(pair.tokens), "logits afterwards")


def check_models_that_cannot_be_split(pair: Pair) -> None:
    for fields, words in [
        ({"n_heads": 3, "d_head": 4}, "blocks.0.attn: 3 heads are no multiple of 2"),
        ({"d_mlp": 25}, "blocks.1.mlp: 25 neurons are no multiple of 2"),
        ({"act_fn": "solu_ln"}, "mid_norm is computed over all neurons; blocks.0.mlp: its activation function solu"),
        ({"num_experts": 3, "experts_per_token": 1, "gated_mlp": True}, "3 experts are no multiple of 2"),
        ({"seed": pair.rank}, "different weights"),
    ]:
        model = HookedTransformer({**SIZES, "act_fn": "gelu", "device": "cpu", **fields})
        refuses(lambda model=model: tensor_parallel(model), words)
        assert not any("Split" in type(module).__name__ for module in model.modules())


def check_the_page(pair: Pair) -> None:
    """The script in docs/scale.md runs."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    [script] = re.findall(r"^```py\n(.*?)^```", page, flags=re.M | re.S)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(compile(script, "scale.md", "exec"), {})


def check_sweep(pair: Pair) -> None:
    """A sweep whose cells enter at the sites of heads."""
    found = []
    for model in (pair.split, pair.whole):
        _, cache = model.run_with_cache(pair.tokens.flip(0))
        found.append(
            get_act_patch_attn_head_out_all_pos(model, pair.tokens, cache, lambda logits: logits[:, -1, 3].sum())
        )
    assert_close(*found)


def refuses(refused: Callable[[], object], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        refused()


CHECKS: dict[str, Callable[[Pair], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}


ONCE = ("models_that_cannot_be_split", "the_page")  # with the first model


def run(rank: int, folder: str) -> None:
    """One of the processes: writes what failed, by model and check."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    failures: dict[str, str] = {}
    tokens = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))
    for name in MODELS:
        pair = Pair(build(name), tensor_parallel(build(name)), tokens, rank)
        for title, check in CHECKS.items():
            if title in ONCE and name != "gpt2":
                continue
            try:
                check(pair)
            except Exception:
                failures[f"{name} {title}"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(failures))
    dist.destroy_process_group()
