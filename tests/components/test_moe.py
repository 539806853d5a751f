"""Mixtures of experts against a loop over all experts, and their sites."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hooked_lm.components.experts.moe import ClampedGatedMLP, InputWeightedMoE, MoE
from hooked_lm.components.experts.router import (
    CorrectedSoftmaxRouter,
    GroupedSigmoidRouter,
    GroupedSoftmaxRouter,
    Router,
    SoftmaxRouter,
    SparseMixerRouter,
    TopKRouter,
    TopKSigmoidRouter,
)
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.verification import identities, input_weights, output_from_sites, output_weights
from hooked_lm.families.decoders.gemma4_text.normed_moe import NormedMoE
from hooked_lm.hooks import HookedRootModule, HookPoint
from tests.close import GRADIENT, assert_close, is_close

D_MODEL, D_MLP, N_EXPERTS, TOP_K = 6, 10, 8, 2
SOFTMAX = SoftmaxRouter()
EXPERT = GatedMLP.Config(D_MODEL, D_MLP)
ROUTERS: dict[str, Router] = {
    "softmax": SoftmaxRouter(),
    "softmax, renormalised": SoftmaxRouter(renormalize=True),
    "top k": TopKRouter(),
    "top k, sigmoid": TopKSigmoidRouter(),
    "grouped softmax": GroupedSoftmaxRouter(n_groups=4, top_groups=2, scale=3.0),
    "grouped sigmoid": GroupedSigmoidRouter(n_groups=4, top_groups=2, scale=1.5),
    "sigmoid, not renormalised": GroupedSigmoidRouter(renormalize=False),
    "sigmoid, not corrected": GroupedSigmoidRouter(corrected=False),
    "sigmoid of capped logits": GroupedSigmoidRouter(soft_cap=0.8, eps=0.0),
    "sigmoid, corrected logits": GroupedSigmoidRouter(corrects_logits=True, eps=0.0, keeps_weights=True),
    "corrected softmax": CorrectedSoftmaxRouter(),
    "sparse mixer": SparseMixerRouter(0.1),
}
MIXTURES: dict[str, MoE.Config] = {
    **{name: MoE.Config(EXPERT, N_EXPERTS, TOP_K, router) for name, router in ROUTERS.items()},
    "router bias": MoE.Config(EXPERT, N_EXPERTS, 3, TopKRouter(), router_bias=True),
    "clamped experts": MoE.Config(ClampedGatedMLP.Config(D_MODEL, D_MLP, limit=0.7), N_EXPERTS, TOP_K, SOFTMAX),
    "plain experts": MoE.Config(MLP.Config(D_MODEL, D_MLP), N_EXPERTS, TOP_K, SOFTMAX),
    "shared": MoE.Config(EXPERT, N_EXPERTS, TOP_K, SOFTMAX, shared=GatedMLP.Config(D_MODEL, 4, bias=True)),
    "shared, gated": MoE.Config(
        EXPERT, N_EXPERTS, TOP_K, SOFTMAX, shared=GatedMLP.Config(D_MODEL, 4), shared_gate=True, router_bias=True
    ),
    "shared, averaged": MoE.Config(
        EXPERT, N_EXPERTS, TOP_K, SOFTMAX, shared=GatedMLP.Config(D_MODEL, 4, bias=True), out_scale=0.5
    ),
    "weighted inputs": InputWeightedMoE.Config(
        EXPERT, N_EXPERTS, TOP_K, TopKSigmoidRouter(), shared=GatedMLP.Config(D_MODEL, 4), out_scale=0.5
    ),
    "all experts": MoE.Config(EXPERT, 3, 3, SOFTMAX),
    "one expert": MoE.Config(EXPERT, 1, 1, SOFTMAX),
}
each_mixture = pytest.mark.parametrize("cfg", MIXTURES.values(), ids=MIXTURES)


class Root(HookedRootModule):
    """A mixture whose points have names, under `mlp`."""

    def __init__(self, cfg: MoE.Config, seed: int = 0) -> None:
        super().__init__()
        self.mlp = cfg.build()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.7, generator=generator)
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def tokens(batch: int = 2, n_pos: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(batch, n_pos, D_MODEL, generator=torch.Generator().manual_seed(seed))


def shares(moe: MoE, x: Tensor) -> Tensor:
    """What each expert is multiplied by, [batch, pos, expert]: zero where it was not chosen."""
    weights, indices = moe.route(x)
    return torch.zeros(*x.shape[:2], len(moe.experts), dtype=x.dtype).scatter_add(-1, indices, weights)


def dense(moe: MoE, x: Tensor, share: Tensor) -> Tensor:
    """All experts on all tokens."""
    if isinstance(moe, InputWeightedMoE):
        out = sum(expert(share[..., e, None] * x) for e, expert in enumerate(moe.experts))
    else:
        out = sum(share[..., e, None] * expert(x) for e, expert in enumerate(moe.experts))
    if moe.shared is not None:
        gate = (x @ moe.W_shared_gate + moe.b_shared_gate).sigmoid() if moe.cfg.shared_gate else 1.0
        out = out + gate * moe.shared(x)
    return out * moe.cfg.out_scale


# ---- the same as computing everything --------------------------------------------------------------------------------


@pytest.mark.every_parameter
@each_mixture
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_loop_over_all_experts(cfg: MoE.Config, dtype: torch.dtype) -> None:
    root, x = Root(cfg).to(dtype), tokens().to(dtype)
    found = root(x)
    assert found.dtype == dtype
    assert_close(found, dense(root.mlp, x, shares(root.mlp, x)))


@each_mixture
def test_gradients_of_everything(cfg: MoE.Config) -> None:
    one, other, x = Root(cfg), Root(cfg), tokens().requires_grad_()
    y = x.detach().clone().requires_grad_()
    one(x).square().sum().backward()
    dense(other.mlp, y, shares(other.mlp, y)).square().sum().backward()
    assert_close(x.grad, y.grad, depth=GRADIENT)
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        if expected.grad is None:
            assert name == "mlp.b_choice"
            assert found.grad is None
        else:  # an expert without tokens has no gradient here, and zeros there
            grad = torch.zeros_like(expected) if found.grad is None else found.grad
            assert_close(grad, expected.grad, depth=GRADIENT, msg=name)


@each_mixture
def test_bf16_is_near_fp64(cfg: MoE.Config) -> None:
    root, x = Root(cfg).bfloat16(), tokens().bfloat16()
    share = shares(root.mlp, x).double()
    expected = dense(copy_in(root, torch.float64), x.double(), share)
    found = root(x)
    assert found.dtype == torch.bfloat16
    assert_close(found, expected, dtype=torch.bfloat16)


def copy_in(root: Root, dtype: torch.dtype) -> MoE:
    other = Root(root.mlp.cfg)
    other.load_state_dict(root.state_dict())
    return other.to(dtype).mlp


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(0, 1000))
def test_any_sizes(n_experts: int, top_k: int, batch: int, n_pos: int, seed: int) -> None:
    root = Root(MoE.Config(EXPERT, n_experts, min(top_k, n_experts), SOFTMAX), seed)
    x = tokens(batch, n_pos, seed)
    assert_close(root(x), dense(root.mlp, x, shares(root.mlp, x)))
    names = [name for name in root.all_points() if "experts." in name]
    _, cache = root.run_with_cache(x, names_filter=names)
    assert list(cache) == names
    positions = torch.cat([cache[n] for n in names if n.endswith("positions")])
    assert len(positions) == batch * n_pos * root.mlp.cfg.top_k


def test_the_same_every_time() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens(4, 50)
    assert all(torch.equal(root(x), root(x)) for _ in range(5))


# ---- routers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@given(seed=st.integers(0, 2**32 - 1), top_k=st.integers(1, 4))
def test_choices(router: Router, seed: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, N_EXPERTS, generator=generator)
    correction = torch.randn(N_EXPERTS, generator=generator) if router.corrected else None
    weights, indices = router(logits, top_k, correction)
    assert weights.shape == indices.shape == (3, top_k)
    assert all(len(set(row)) == top_k for row in indices.tolist())
    assert (weights > 0).all()
    if getattr(router, "renormalize", isinstance(router, TopKRouter | CorrectedSoftmaxRouter)):
        assert_close(weights.sum(-1), torch.full((3,), getattr(router, "scale", 1.0)))


def test_choices_by_hand() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    p, s = logits.softmax(-1), logits.sigmoid()

    def check(router: Router, expected: dict[int, Tensor], correction: Tensor | None = None) -> None:
        weights, indices = router(logits, 2, correction)
        assert set(indices.tolist()) == set(expected)
        for weight, index in zip(weights, indices.tolist(), strict=True):
            assert_close(weight, expected[index])

    check(SoftmaxRouter(), {1: p[1], 3: p[3]})
    check(SoftmaxRouter(renormalize=True), {1: p[1] / (p[1] + p[3]), 3: p[3] / (p[1] + p[3])})
    check(TopKSigmoidRouter(), {1: s[1], 3: s[3]})
    check(TopKRouter(), {1: p[1] / (p[1] + p[3]), 3: p[3] / (p[1] + p[3])})
    # the best expert decides between {0, 1} and {2, 3}
    check(GroupedSoftmaxRouter(2, 1, scale=5.0), {1: 5 * p[1], 0: 5 * p[0]})
    # the sum of two decides: 1.45 against 1.61
    check(GroupedSigmoidRouter(2, 1, renormalize=False), {2: s[2], 3: s[3]})
    check(GroupedSigmoidRouter(corrected=False, renormalize=False), {1: s[1], 3: s[3]})
    correction = torch.tensor([0.0, 0.0, 1.0, 0.0])
    both = s[1] + s[2]
    check(GroupedSigmoidRouter(scale=2.0), {1: 2 * s[1] / both, 2: 2 * s[2] / both}, correction)
    capped = (3.0 * (logits / 3.0).tanh()).sigmoid()
    check(GroupedSigmoidRouter(soft_cap=3.0, renormalize=False), {1: capped[1], 2: capped[2]}, correction)
    # a correction of one outweighs any difference of sigmoids, but not one of logits
    check(GroupedSigmoidRouter(renormalize=False), {0: s[0], 1: s[1]}, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    check(
        GroupedSigmoidRouter(renormalize=False, corrects_logits=True),
        {1: s[1], 3: s[3]},
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
    )
    check(CorrectedSoftmaxRouter(), {1: p[1] / (p[1] + p[2]), 2: p[2] / (p[1] + p[2])}, correction)
    # behind by at most 0.4 of the larger one: 3 and 2 are near 3; then 2 is alone, 1 is behind by 0.5
    two = logits[[1, 3]].softmax(-1)
    check(SparseMixerRouter(0.2), {1: two[0], 3: torch.tensor(1.0)})


def test_invalid_configs_of_mixtures() -> None:
    with pytest.raises(ValueError, match=r"top_k=9 must be .* n_experts=8"):
        MoE.Config(EXPERT, N_EXPERTS, 9, SOFTMAX).build()
    with pytest.raises(ValueError, match="shared_gate"):
        MoE.Config(EXPERT, N_EXPERTS, 1, SOFTMAX, shared_gate=True).build()
    with pytest.raises(ValueError, match=r"out_scale=0\.5 must be 1"):
        NormedMoE.Config(
            EXPERT, N_EXPERTS, 1, SOFTMAX, shared=EXPERT, out_scale=0.5, norm=RMSNorm.Config(D_MODEL)
        ).build()


# ---- sites -----------------------------------------------------------------------------------------------------------


def first_expert_only(value: Tensor, hook: HookPoint) -> Tensor:
    value[..., 0], value[..., 1] = 0, 1
    return value


@each_mixture
def test_each_site_fires_once_with_its_dimensions(cfg: MoE.Config) -> None:
    root, x = Root(cfg), tokens()
    fired: list[str] = []
    out = root.run_with_hooks(x, fwd_hooks=[("*", lambda value, hook: fired.append(hook.name))])
    assert sorted(fired) == sorted(root.all_points())
    assert_close(out, root(x))
    _, cache = root.run_with_cache(x, names_filter="*")
    sizes = {"batch": 2, "pos": 5, "d_model": D_MODEL, "expert": cfg.n_experts, "top_k": cfg.top_k, "1": 1, "2": 2}
    for name, value in cache.items():
        part = name.split(".")
        sizes["d_mlp"] = cfg.shared.d_mlp if cfg.shared and part[1] == "shared" else D_MLP
        sizes["routed"] = len(cache[f"mlp.experts.{part[2]}.hook_routed_positions"]) if part[1] == "experts" else 0
        assert value.shape == tuple(sizes[dim] for dim in root.hook_dict[name].dims), name
    assert [name for name in root.run_with_cache(x)[1] if ".experts." in name] == []


def test_sites_of_an_expert_have_the_tokens_sent_to_it() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    _, cache = root.run_with_cache(x, names_filter="*")
    indices = cache["mlp.hook_expert_indices"]
    for e in range(N_EXPERTS):
        positions = cache[f"mlp.experts.{e}.hook_routed_positions"]
        assert positions.tolist() == (indices == e).any(-1).nonzero().tolist()
        assert_close(cache[f"mlp.experts.{e}.hook_in"], x[positions[:, 0], positions[:, 1]])


def test_an_expert_without_tokens_is_computed_only_for_listeners() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    to_two = ("mlp.hook_expert_indices", first_expert_only)
    calls: list[int] = []
    for e, expert in enumerate(root.mlp.experts):
        expert.register_forward_hook(lambda module, args, out, e=e: calls.append(e))
    root.run_with_hooks(x, fwd_hooks=[to_two])
    assert calls == [0, 1]
    shapes: list[Any] = []
    root.run_with_hooks(
        x, fwd_hooks=[to_two, ("mlp.experts.5.hook_post", lambda value, hook: shapes.append(value.shape))]
    )
    assert calls == [0, 1, 0, 1, 5]
    assert shapes == [(0, D_MLP)]
    handle = root.hook_dict["mlp.experts.6.hook_in"].add_hook(lambda value, hook: None)
    root.run_with_hooks(x, fwd_hooks=[to_two])
    handle.remove()
    root.run_with_hooks(x, fwd_hooks=[to_two])
    assert calls[5:] == [0, 1, 6, 0, 1], "the hooks of an earlier run are no longer there"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda root: pickle.loads(pickle.dumps(root))])
def test_a_copy_has_its_own_listeners(copied: Callable[[Root], Root]) -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    with root.hooks([("*", lambda value, hook: None)]):
        other = copied(root)
    fired: dict[str, list[str]] = {"root": [], "other": []}
    for name, model in (("root", root), ("other", other)):
        model.run_with_hooks(x, fwd_hooks=[("*", lambda value, hook, n=name: fired[n].append(hook.name))])
    assert sorted(fired["root"]) == sorted(fired["other"]) == sorted(root.all_points())
    assert_close(other(x), root(x))


def test_threads_run_their_own_hooks() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()

    def run(e: int) -> int:
        fired: list[str] = []
        for _ in range(30):
            root.run_with_hooks(
                x, fwd_hooks=[(f"mlp.experts.{e}.hook_post", lambda value, hook: fired.append(hook.name))]
            )
        return fired.count(f"mlp.experts.{e}.hook_post")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(N_EXPERTS))) == [30] * N_EXPERTS
    root(x)
    assert not root.mlp.hooked_points


def test_edited_indices_send_tokens_elsewhere() -> None:
    root, x = Root(MIXTURES["shared"]), tokens()
    found = root.run_with_hooks(x, fwd_hooks=[("mlp.hook_expert_indices", first_expert_only)])
    weights, _ = root.mlp.route(x)
    share = torch.zeros(2, 5, N_EXPERTS)
    share[..., :2] = weights
    assert_close(found, dense(root.mlp, x, share))


def test_a_token_may_be_sent_twice_to_one_expert() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    zeros = [("mlp.hook_expert_indices", lambda value, hook: torch.zeros_like(value))]
    weights, _ = root.mlp.route(x)
    expected = weights.sum(-1, keepdim=True) * root.mlp.experts[0](x)
    assert_close(root.run_with_hooks(x, fwd_hooks=zeros), expected)


def test_edited_weights_and_logits() -> None:
    root, x = Root(MIXTURES["softmax, renormalised"]), tokens()
    doubled = root.run_with_hooks(x, fwd_hooks=[("mlp.hook_expert_weights", lambda value, hook: 2 * value)])
    assert_close(doubled, 2 * root(x))

    def never_the_first(value: Tensor, hook: HookPoint) -> Tensor:
        value[..., 0] = float("-inf")
        return value

    with root.hooks([("mlp.hook_router_logits", never_the_first)]):
        _, cache = root.run_with_cache(x, names_filter="*")
    assert (cache["mlp.hook_expert_indices"] != 0).all()
    assert len(cache["mlp.experts.0.hook_post"]) == 0


def test_edits_inside_an_expert() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    share = shares(root.mlp, x)
    share[..., 3] = 0
    without = root.run_with_hooks(x, fwd_hooks=[("mlp.experts.3.hook_out", lambda value, hook: 0 * value)])
    assert_close(without, dense(root.mlp, x, share))


def test_gradients_at_the_sites_of_experts() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    found: dict[str, Tensor] = {}
    names = ["mlp.experts.*.hook_post", "mlp.hook_expert_weights"]

    def keep(value: Tensor, hook: HookPoint) -> None:
        found[hook.name or ""] = value

    with root.hooks(bwd_hooks=[(names, keep)]):
        root(x).sum().backward()
    assert len(found) == N_EXPERTS + 1
    outs = torch.stack([root.mlp.experts[e](x).sum(-1) for e in range(N_EXPERTS)], -1)
    assert_close(found["mlp.hook_expert_weights"], outs.gather(-1, root.mlp.route(x)[1]))


def test_indices_out_of_range_are_refused() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    with pytest.raises(ValueError, match=r"contains 9; .* 0 to 7"):
        root.run_with_hooks(x, fwd_hooks=[("mlp.hook_expert_indices", lambda value, hook: value * 0 + 9)])


def test_an_expert_may_be_replaced() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    share = shares(root.mlp, x)
    root.mlp.experts[2] = nn.Linear(D_MODEL, D_MODEL)
    root.setup()
    expected = dense(root.mlp, x, share)
    assert_close(root(x), expected)
    _, cache = root.run_with_cache(x, names_filter="*")
    assert "mlp.experts.2.hook_out" not in cache


# ---- the protocol of sublayers ---------------------------------------------------------------------------------------


@each_mixture
def test_identities_hold_and_the_output_is_rebuilt(cfg: MoE.Config) -> None:
    root, x = Root(cfg), tokens()
    out, cache = root.run_with_cache(x, names_filter="*")

    def at(name: str) -> Tensor:
        return cache[f"mlp.{name}"]

    names = []
    for name, pair in identities(root.mlp, at, lambda: x):
        names.append(name)
        left, right = pair()
        assert_close(left, right, msg=name)
    assert len(names) == len(set(names)) >= 5
    assert_close(output_from_sites(root.mlp, at), out)


def test_identities_notice_what_is_wrong() -> None:
    root, x = Root(MIXTURES["softmax"]), tokens()
    _, cache = root.run_with_cache(x, names_filter="*")

    def broken(wrong: str) -> set[str]:
        def at(name: str) -> Tensor:
            value = cache[f"mlp.{name}"]
            return value.flip(-1) if name == wrong else value

        pairs = {name: pair() for name, pair in identities(root.mlp, at, lambda: x)}
        pairs["rebuilt"] = output_from_sites(root.mlp, at), root(x)
        return {name for name, (a, b) in pairs.items() if not is_close(a, b.to(a.dtype))}

    busy = cache["mlp.hook_expert_indices"][0, 0, 0].item()
    assert broken("hook_expert_weights") == {"router(router_logits) == expert_weights", "rebuilt"}
    assert broken("hook_expert_indices") >= {"router(router_logits) == expert_indices"}
    assert "experts: act(pre) * pre_linear == post" in broken(f"experts.{busy}.hook_post")
    assert "rebuilt" in broken(f"experts.{busy}.hook_post")


@each_mixture
def test_input_and_output_weights(cfg: MoE.Config) -> None:
    """Scaling the input cancels scaling the input weights; only the output weights write the output."""
    root, x = Root(cfg), tokens()
    expected, gain = root(x), torch.rand(D_MODEL) + 0.5
    with torch.no_grad():
        for module, weight, bias in input_weights(root.mlp):
            getattr(module, weight).mul_(gain[:, None])
            assert getattr(module, bias) is None or getattr(module, bias).shape == getattr(module, weight).shape[1:]
        assert_close(root(x / gain), expected)
        for weight in output_weights(root.mlp):
            assert weight.shape[-1] == D_MODEL
            weight.zero_()
        assert not root(x).any()


def test_clamped_experts_by_hand() -> None:
    mlp: Callable[[Tensor], Tensor] = ClampedGatedMLP.Config(D_MODEL, D_MLP, alpha=1.5, limit=0.8).build()
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_()
    x = tokens()
    gate = torch.minimum(x @ mlp.W_gate + mlp.b_gate_in[0::2], torch.tensor(0.8))
    linear = (x @ mlp.W_in + mlp.b_gate_in[1::2]).clamp(-0.8, 0.8)
    expected = (gate / (1 + (-1.5 * gate).exp()) * (linear + 1)) @ mlp.W_out + mlp.b_out
    assert_close(mlp(x), expected)


def test_casts_leave_the_routers_weights_in_fp32() -> None:
    for name, kept in (
        ("softmax", set()),
        ("grouped sigmoid", {"b_choice"}),
        ("sigmoid, not corrected", set()),
        ("corrected softmax", {"b_choice", "W_router"}),
    ):
        root = Root(MIXTURES[name])
        before = {n: p.clone() for n, p in root.mlp.named_parameters()}
        root.to(torch.bfloat16).half().bfloat16()
        assert {n for n, p in root.mlp.named_parameters() if p.dtype == torch.float32} == kept
        assert all(torch.equal(getattr(root.mlp, n), before[n]) for n in kept)
        assert all(p.requires_grad == (n != "b_choice") for n, p in root.mlp.named_parameters())
        assert {p.dtype for p in root.double().parameters()} == {torch.float64}
        assert root.to("meta").mlp.W_router.is_meta


def test_weights_are_where_a_checkpoint_puts_them() -> None:
    """`W_router` and experts whose names and shapes are those of an MLP."""
    moe = MoE.Config(EXPERT, 2, 1, replace(GroupedSigmoidRouter(), scale=2.0), shared=EXPERT).build()
    shapes = {name: tuple(p.shape) for name, p in moe.named_parameters()}
    weights = {"W_gate": (D_MODEL, D_MLP), "W_in": (D_MODEL, D_MLP), "W_out": (D_MLP, D_MODEL)}
    experts = {f"{part}.{n}": s for part in ("experts.0", "experts.1", "shared") for n, s in weights.items()}
    assert shapes == {"W_router": (D_MODEL, 2), "b_choice": (2,), **experts}
    assert not moe.b_choice.requires_grad
