"""Edge attribution against gates that autograd differentiates, and exact edge patching against a loop of forward passes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hooked_lm import HookedTransformer, HookedTransformerConfig, HookedVisionLanguage, patching
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.attribution_result import agreement
from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.edges import METHODS, attribute_edges
from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.analysis.attribution.nodes import attribute
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import Rows, ids_of
from tests.close import GRADIENT, assert_apart, assert_close, assert_near
from tests.core import thinned
from tests.families import DECODER_CASES
from tests.families._models import hooked
from tests.families._vision import hooked_vlm
from tests.families.vision_languages import CASES as VISION_CASES
from tests.unchecked import unchecked

# heads that share keys, parallel blocks of one norm or two, norms behind attention or in it, experts, states, latents, a scale,
# states beside attention, a stream that is multiplied and to which a third part adds
KINDS = [
    "gpt2",
    "llama",
    "gptj",
    "gpt_neox",
    "gemma2",
    "mixtral",
    "bamba",
    "deepseek_v3",
    "granite",
    "bitnet",
    "falcon_h1",
    "gemma4_text",
]
# models that read images, alone, as tokens that see each other, and also after layers
IMAGES = ["llava", "gemma3", "qwen3_vl"]


def model_of(family: str) -> HookedTransformer:
    """A tiny model of a family, in fp64."""
    if family in IMAGES:
        return copy.deepcopy(hooked_vlm(next(case for case in VISION_CASES if case.family == family))).double()
    case = next(case for case in DECODER_CASES if case.family == family)
    return copy.deepcopy(hooked(case)).double()


def runs_of(model: HookedTransformer) -> tuple[Rows, Rows]:
    """Corrupted and clean prompts, with images if the model reads them."""
    if isinstance(model, HookedVisionLanguage):
        return model.drawn_inputs(0), model.drawn_inputs(1)
    return prompts_of(model)


def prompts_of(model: HookedTransformer, n_prompts: int = 2, n_pos: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    corrupted, clean = torch.randint(model.cfg.d_vocab, (2, n_prompts, n_pos), generator=generator)
    return corrupted, clean


def last_logits(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5].square()


# ---- an independent computation --------------------------------------------------------------------------------------


def written(model: HookedTransformer, tokens: Rows) -> Tensor:
    """What every writer writes, all at once [writer, batch, pos, d_model]."""
    nodes = Graph.of(model).writers
    with torch.no_grad(), unchecked():
        _, cache = model.run_with_cache(tokens, names_filter=[*{node.site for node in nodes}])
    return torch.stack([node.of(cache[node.site]) for node in nodes])


def gated(
    model: HookedTransformer, tokens: Rows, changes: Tensor, hooks: Sequence[tuple[str, Callable]] = ()
) -> Tensor:
    """The derivative by a gate on every edge, [writer, reader, batch], of the metric of a run in which each reader is told
    a gate's share of what each writer writes differently."""
    graph = Graph.of(model)
    gates = torch.zeros(len(graph.readers), len(graph.writers), tokens.shape[0], dtype=changes.dtype).requires_grad_()

    def tell(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        for i, node in enumerate(graph.readers):
            if node.site == hook.name:
                told = torch.einsum("wb,wbpm->bpm", gates[i] * graph.is_edge[:, i, None], changes)
                value[(slice(None), slice(None), *(() if node.head is None else (node.head,)))] += told / node.factor
        return value

    sites = dict.fromkeys(node.site for node in graph.readers)
    with unchecked():
        logits = model.run_with_hooks(tokens, fwd_hooks=[*hooks, *((site, tell) for site in sites)])
    found = torch.autograd.grad(last_logits(logits).sum(), gates)[0].transpose(0, 1)
    return found.masked_fill(~graph.is_edge[:, :, None], torch.nan)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    size = expected.nan_to_num().abs().max().item()
    assert size > 1e-3, "something is told"
    assert_close(found, expected.float(), depth=GRADIENT)


def scores(model: HookedTransformer, runs: tuple[Rows, Rows], **options: Any) -> Tensor:
    with unchecked():
        found = attribute_edges(model, *runs, metric=last_logits, check=False, **options)
    return found.effects().values


class Held(nn.Module):
    """A norm with the divisor that it had in a run."""

    def __init__(self, norm: Any, x: Tensor) -> None:
        super().__init__()
        self.norm, self.centres = norm, isinstance(norm, LayerNorm)
        self.scale = self.centred(x).square().mean(-1, keepdim=True).add(norm.cfg.eps).sqrt()

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if x.ndim == 3 else self.scale[:, :, None]
        return self.norm.apply_weights(self.centred(x) / scale)


def with_held_norms(model: HookedTransformer, tokens: Tensor) -> HookedTransformer:
    """A copy whose norms of the stream are linear."""
    model, before = copy.deepcopy(model), copy.deepcopy(model)
    _, cache = before.run_with_cache(tokens)
    last = len(model.blocks) - 1
    for layer, block in enumerate(model.blocks):
        block.ln1 = Held(block.ln1, cache["resid_pre", layer])
        if hasattr(block, "ln2") and not isinstance(block.ln2, nn.Identity):
            stream = "resid_mid" if f"blocks.{layer}.hook_resid_mid" in before.hook_dict else "resid_pre"
            block.ln2 = Held(block.ln2, cache[stream, layer])
    model.ln_final = Held(norm_of(model, "ln_final"), cache["resid_post", last])
    model.setup()
    return model


# ---- the scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*KINDS, *IMAGES])
def test_scores_are_the_derivatives_by_gates_on_all_edges(family: str):
    model = model_of(family)
    corrupted, clean = runs = runs_of(model)
    changes = written(model, clean) - written(model, corrupted)
    assert_same(scores(model, runs), gated(model, corrupted, changes))


@pytest.mark.parametrize("kind", ["shortformer", "ungrouped"])
def test_scores_where_heads_read_otherwise(kind: str):
    """Queries and keys that are told the position besides, and keys and values that are made for each query head."""
    if kind == "shortformer":
        model = toy(positional_embedding_type="shortformer", normalization_type="LN").double()
        for block in model.blocks:  # bounds, so that it matters how far the position carries them
            block.attn.cfg = replace(block.attn.cfg, clip=0.8)
    else:
        model = model_of("llama")
        model.set_ungroup_grouped_query_attention(True)
        assert Graph.of(model).reader("L1H3<k>")
    corrupted, clean = runs = prompts_of(model)
    changes = written(model, clean) - written(model, corrupted)
    assert_same(scores(model, runs), gated(model, corrupted, changes))


def test_scores_are_finite_differences():
    model = model_of("gpt2")
    corrupted, clean = runs = prompts_of(model)
    graph, changes = Graph.of(model), written(model, clean) - written(model, corrupted)
    found, step = scores(model, runs), 1e-5
    for writer, reader in [("input", "L0H1<k>"), ("L0H2", "m0"), ("m0", "L1H0<v>"), ("L1H3", "logits")]:
        u, v = graph.edge(writer, reader)
        ends = [told(model, corrupted, graph.readers[v], by * changes[u]) for by in (step, -step)]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert_close(found[u, v], expected.float())
        assert expected.abs().max() > 1e-4


@torch.no_grad()
def told(model: HookedTransformer, tokens: Rows, reader: Node, change: Tensor) -> Tensor:
    """The metric of a run in which a reader reads something else."""

    def tell(value: Tensor, hook: Any) -> Tensor:
        value[(slice(None), slice(None), *(() if reader.head is None else (reader.head,)))] += change / reader.factor
        return value

    with unchecked():
        return last_logits(model.run_with_hooks(tokens, fwd_hooks=[(reader.site, tell)]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "phi", "mamba"])
def test_frozen_norms_are_those_of_a_model_whose_norms_are_linear(family: str):
    model = model_of(family)
    corrupted, clean = runs = prompts_of(model)
    changes = written(model, clean) - written(model, corrupted)
    frozen = scores(model, runs, backward=BackwardRules(freeze_norms=True))
    assert_same(frozen, gated(with_held_norms(model, corrupted), corrupted, changes))
    assert_apart(frozen, scores(model, runs), msg="the divisors matter")


def test_edges_into_the_logits_sum_to_the_gradient_of_the_whole_stream():
    model = model_of("llama")
    runs = prompts_of(model)
    site = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    streams = [model.run_with_cache(tokens, names_filter=[site])[1][site].detach() for tokens in runs]
    stream = streams[0].clone().requires_grad_()
    logits = model.unembed(Held(norm_of(model, "ln_final"), streams[0])(stream))
    (gradient,) = torch.autograd.grad(last_logits(logits).sum(), stream)
    expected = ((streams[1] - streams[0]) * gradient).sum((1, 2))
    found = scores(model, runs, backward=BackwardRules(freeze_norms=True))[:, -1]
    assert_close(found.sum(0), expected.float())


@pytest.mark.parametrize(
    ("family", "writer", "site"), [("llava", "input", "resid_pre"), ("qwen3_vl", "d0", "deepstack")]
)
def test_edges_from_images_sum_to_the_attribution_of_their_tokens(family: str, writer: str, site: str):
    """What images add is read at all positions, also at those of their tokens alone, which are the patches of a LLaVA."""
    model = model_of(family)
    runs = runs_of(model)
    with unchecked():
        by_position = attribute(model, *runs, metric=last_logits, sites=site, layers=[0], check=False)
        by_token = attribute(model, *runs, metric=last_logits, sites="hook_image_features", check=False)
    effects = by_position.effects().values[0]
    assert_close(scores(model, runs)[Graph.of(model).writer(writer)].nansum(0), effects.sum(0))
    is_image = ids_of(runs[0])[0] == model.tree.image_token
    assert effects[is_image].abs().sum() > 0
    if site == "deepstack":
        assert not effects[~is_image].any()
    else:
        assert_close(by_token.effects().values, effects[is_image])


@pytest.mark.parametrize("family", thinned(["llama", "qwen3_vl"], keep=["llama"]))
def test_integrated_gradients_average_the_runs_between(family: str):
    model, steps = model_of(family), 3
    corrupted, clean = runs = runs_of(model)
    graph, changes = Graph.of(model), written(model, clean) - written(model, corrupted)
    by_site = {site: [i for i, node in enumerate(graph.writers) if node.site == site] for site in sites_of(graph)}

    def between(sites: Sequence[str]) -> Tensor:
        moves = {added(site): changes[by_site[site]].sum(0) for site in sites}
        hooks = [
            [(site, lambda value, hook, by=(step + 0.5) / steps * move: value + by) for site, move in moves.items()]
            for step in range(steps)
        ]
        return torch.stack([gated(model, corrupted, changes, some) for some in hooks]).mean(0)

    by_inputs = between([site for site in by_site if site.endswith(("0.hook_resid_pre", "deepstack"))])
    assert_same(scores(model, runs, method="eap-ig-inputs", steps=steps), by_inputs)
    by_activations = torch.full_like(by_inputs, torch.nan)
    for site, own in by_site.items():
        by_activations[own] = between([site])[own]
    assert_same(scores(model, runs, method="eap-ig-activations", steps=steps), by_activations)
    assert_apart(by_inputs, by_activations)


STEPS = "an integral by sixteen steps"


@pytest.mark.slow
def test_integrated_gradients_are_complete():
    """The edges of a site sum to what changes when all of them write what they wrote in the other run (Sundararajan et al.
    2017, arXiv:1703.01365): of the input, to the other run."""
    model = model_of("gptj")
    corrupted, clean = runs = prompts_of(model)
    graph, changes = Graph.of(model), written(model, clean) - written(model, corrupted)
    found = {m: scores(model, runs, method=m, steps=16).nansum(1) for m in METHODS}
    with torch.no_grad(), unchecked():
        before, after = last_logits(model(corrupted)), last_logits(model(clean))
        assert_near(found["eap-ig-inputs"][0], after - before, 0.01, because=STEPS)
        for site in sites_of(graph):
            own = [i for i, node in enumerate(graph.writers) if node.site == site]
            change = changes[own].sum(0)
            hook = (added(site), lambda value, hook, by=change: value + by)
            moved = model.run_with_hooks(corrupted, fwd_hooks=[hook])
            expected = (last_logits(moved) - before).float()
            assert_near(found["eap-ig-activations"][own].sum(0), expected, 0.01, because=STEPS)
    assert_apart(found["eap"][0], (after - before).float(), msg="one step is not enough")


def sites_of(graph: Graph) -> list[str]:
    return list(dict.fromkeys(node.site for node in graph.writers))


def added(site: str) -> str:
    """Where what the writers of a site write enters the stream."""
    return site.replace("attn.hook_result", "hook_attn_out")


@pytest.mark.parametrize("replace_with", ["mean", "zero"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_replacements_and_directions(replace_with: str, direction: str):
    model = model_of("llama")
    corrupted, clean = runs = prompts_of(model)
    first, other = runs if direction == "denoise" else (clean, corrupted)
    new = {"mean": written(model, other).mean(1, keepdim=True), "zero": torch.zeros(1)}[replace_with]
    found = scores(model, runs, replace_with=replace_with, direction=direction)
    assert_same(found, gated(model, first, new - written(model, first)))
    options: dict[str, Any] = {"metric": last_logits, "replace_with": replace_with, "direction": direction}
    with unchecked():
        result = attribute_edges(model, *runs, check=3, **options)
        exact = patch_edges(model, *runs, progress=False, **options)
    with torch.no_grad():
        assert_close(result.corrupted, last_logits(model(corrupted)).float())
        assert_close(result.clean, last_logits(model(clean)).float())
    there = ~result.exact.isnan()
    assert int(there.any(-1).sum()) == 3
    assert_close(result.exact[there], exact.values[there])
    assert_close(result.unchanged, exact.unchanged)


def test_prompts_are_scored_by_themselves_and_memory_changes_nothing():
    model = model_of("llama")
    runs = corrupted, clean = prompts_of(model, 3)
    together = scores(model, runs)
    assert_close(scores(model, runs, max_memory=1), together)
    for i in range(3):
        alone = scores(model, (corrupted[i : i + 1], clean[i : i + 1]))
        assert_close(alone[..., 0], together[..., i])
    mean = attribute_edges(model, *runs, metric=lambda logits: last_logits(logits).mean(), check=False)
    assert_close(mean.effects().values[..., 0], together.mean(-1))


# ---- exact patching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*KINDS, *IMAGES])
def test_exact_patching_is_a_loop_of_forward_passes(family: str):
    model = model_of(family)
    corrupted, clean = runs = runs_of(model)
    graph, changes = Graph.of(model), written(model, clean) - written(model, corrupted)
    all_edges = list(graph.named(graph.is_edge))
    edges = [*all_edges[:: 1 + len(all_edges) // 24], (graph.writers[-1].name, "logits")]
    with unchecked():
        result = patch_edges(model, *runs, metric=last_logits, edges=edges, progress=False)
    assert int((~result.mean.isnan()).sum()) == len(set(edges))
    changed = []
    for writer, reader in edges:
        u, v = graph.edge(writer, reader)
        expected = told(model, corrupted, graph.readers[v], changes[u])
        assert_close(result.values[u, v], expected.float())
        changed.append((expected - result.corrupted).abs().max())
    assert torch.stack(changed).median() > 1e-4


def test_an_interrupt_keeps_what_was_measured():
    model, calls = toy(), []

    def interrupted(logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 30:
            raise KeyboardInterrupt
        return logits[:, -1, 3] + 0 * logits.sum()

    with unchecked(), pytest.raises(patching.SweepInterrupted) as caught:
        patch_edges(model, *prompts_of(model), metric=interrupted, progress=False)
    measured = int((~caught.value.result.mean.isnan()).sum())
    assert 10 < measured < 30 < Graph.of(model).n_edges
    assert list(caught.value.result.axes) == ["writer", "reader"]


def test_all_edges_into_the_logits_together_are_the_clean_run():
    """With a final norm that is none, what each writer adds to the logits is exact and adds up."""
    model = toy()
    runs = prompts_of(model)
    result = patch_edges(model, *runs, metric=lambda logits: logits[:, -1, 3], progress=False)
    total = result.effects().select(reader="logits").values.sum(0)
    assert_close(total, result.clean - result.corrupted)
    estimated = attribute_edges(model, *runs, metric=lambda logits: logits[:, -1, 3], check=False)
    assert_close(estimated.select(reader="logits").values, result.select(reader="logits").values)


def toy(**more: Any) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu", "seed": 0}
    return HookedTransformer(
        HookedTransformerConfig(**{**sizes, "normalization_type": None, "initializer_range": 0.3, **more})
    )


# ---- agreement -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task() -> tuple[HookedTransformer, list[Tensor], metrics.Metric]:
    model, pairs = HookedTransformer.from_pretrained("demo"), prompt_pairs(4)
    runs = [torch.cat([model.to_tokens(getattr(pair, of)) for pair in pairs]) for of in ("corrupted", "clean")]
    ids = [
        torch.tensor([model.to_single_token(getattr(pair, of)) for pair in pairs]) for of in ("answer", "wrong_answer")
    ]
    return model, runs, metrics.logit_difference(*ids)


@pytest.fixture(scope="module")
def exact(task):
    model, runs, metric = task
    with unchecked():
        return patch_edges(model, *runs, metric=metric, progress=False)


@pytest.fixture(scope="module")
def estimates(task):
    model, runs, metric = task
    with unchecked():
        return {m: attribute_edges(model, *runs, metric=metric, method=m, check=False) for m in METHODS}


# Of all edges, most of which are tiny, the gradient of the changed run itself ranks best; of what counts, the averages and
# RelP are nearer to the exact effects.
BOUNDS = {
    "eap": (0.85, 0.9),
    "eap-ig-inputs": (0.65, 0.98),
    "eap-ig-activations": (0.75, 0.98),
    "relp": (0.65, 0.95),
    "gim": (0.65, 0.65),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_agreement_on_the_bundled_model(estimates, exact, method: str):
    both = estimates[method].effects().mean.flatten(), exact.effects().mean.flatten()
    agreed = agreement(*both)
    assert agreed["cells"] == 1519
    assert agreed["spearman"] > BOUNDS[method][0]
    assert agreed["pearson"] > BOUNDS[method][1]
    assert agreed["sign"] > 0.95
    shuffled = both[0][torch.randperm(len(both[0]), generator=torch.Generator().manual_seed(0))]
    assert abs(agreement(shuffled, both[1])["spearman"]) < 0.2, "what agrees with nothing shows it"


@pytest.mark.slow
def test_integrated_gradients_are_nearer_to_the_exact_effects(estimates, exact):
    expected, errors = exact.effects().mean.nan_to_num(), {}
    for method, found in estimates.items():
        errors[method] = float((found.effects().mean.nan_to_num() - expected).norm() / expected.norm())
    assert errors["eap-ig-inputs"] < errors["eap"] / 2
    assert errors["eap-ig-activations"] < errors["eap"] / 2


@pytest.mark.parametrize(("family", "least"), [("gpt2", 0.8), ("gptj", 0.8), ("llama", 0.65)])
def test_agreement_on_random_models(family: str, least: float):
    """Their prompts have hardly a token in common: what gradients say of so large a change is less than of a name."""
    model = model_of(family)
    runs = prompts_of(model, 4)
    with unchecked():
        found = attribute_edges(model, *runs, metric=last_logits, check=True)
    assert found.agreement["cells"].item() == Graph.of(model).n_edges
    assert found.agreement["spearman"].item() > least


def test_small_changes_are_estimated_to_the_point():
    """The first order is all that is left of a change that is small: here of embeddings that hardly differ."""
    model = toy(normalization_type="LN", d_vocab=12)
    with torch.no_grad():
        model.embed.W_E[1:] = model.embed.W_E[:1] + 1e-3 * model.embed.W_E[1:]
    with unchecked():
        found = attribute_edges(model, *prompts_of(model), metric=last_logits, check=True)
    assert found.agreement["spearman"].item() > 0.99
    assert "agrees with exact patching of" in repr(found)


@pytest.mark.slow
def test_what_is_affordable_is_checked(task):
    model, runs, metric = task
    with unchecked():
        found = attribute_edges(model, *runs, metric=metric)
    assert found.agreement["cells"].item() == 1519
    some = attribute_edges(model, *runs, metric=metric, check=12, seed=1)
    assert some.agreement["cells"].item() == 12
    assert some.about["check_seed"] == 1
    other = attribute_edges(model, *runs, metric=metric, check=12, seed=2)
    assert not torch.equal(other.exact.isnan(), some.exact.isnan())
    assert "not checked" in repr(attribute_edges(model, *runs, metric=metric, check=False))


def test_results_can_be_saved(task, tmp_path):
    model, runs, metric = task
    found = attribute_edges(model, *runs, metric=metric, check=5)
    found.save(tmp_path / "edges")
    again = type(found).load(tmp_path / "edges")
    assert_close(again.values, found.values)
    assert again.method == "eap"
    assert list(found.top(3).columns)[:2] == ["writer", "reader"]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Watches for the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


@pytest.mark.parametrize("method", thinned(METHODS, keep=["eap"]))
def test_no_tensor_of_all_edges_is_made(method: str):
    model = toy(n_layers=6, d_model=32, normalization_type="LN", d_vocab=5)
    runs = prompts_of(model, 4, 8)
    unit = runs[0].numel() * model.cfg.d_model
    with Largest() as largest:
        attribute_edges(model, *runs, metric=lambda logits: logits[:, -1, 3], method=method, steps=2, check=False)
    of_a_layer = 3 * model.cfg.n_heads + 2
    assert largest.numel <= of_a_layer * unit
    with Largest() as control:
        written(model, runs[0])
    assert control.numel >= len(Graph.of(model).writers) * unit > 1.5 * largest.numel


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_nothing_of_the_model_is_changed(task):
    model, runs, _ = task
    before = [(p.requires_grad, p.grad) for p in model.parameters()]
    attribute_edges(model, *runs, metric=last_logits, check=False)
    with pytest.raises(ValueError, match="has no gradient"):
        attribute_edges(model, *runs, metric=metrics.rank(3), check=False)
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == before
    assert not any(point.is_listening for point in model.hook_points())


def test_errors(task):
    model, (corrupted, clean), metric = task
    good: dict[str, Any] = {"metric": metric, "check": False}
    with pytest.raises(ValueError, match="method must be one of 'eap'"):
        attribute_edges(model, corrupted, clean, **good, method="eap-ig")
    with pytest.raises(ValueError, match="steps must be a positive number, got 0"):
        attribute_edges(model, corrupted, clean, **good, method="eap-ig-inputs", steps=0)
    with pytest.raises(ValueError, match="must have the same shape"):
        attribute_edges(model, corrupted, clean[:, 1:], **good)
    with pytest.raises(ValueError, match="needs the other run"):
        attribute_edges(model, corrupted, **good)
    with pytest.raises(ValueError, match="replace_with must be one of"):
        attribute_edges(model, corrupted, clean, **good, replace_with="median")
    with pytest.raises(ValueError, match="direction must be"):
        patch_edges(model, corrupted, clean, metric=metric, direction="up")
    with pytest.raises(ValueError, match="max_memory must be"):
        attribute_edges(model, corrupted, clean, **good, max_memory=-1)
    with pytest.raises(ValueError, match="check must be"):
        attribute_edges(model, corrupted, clean, metric=metric, check=-1)
    with pytest.raises(TypeError, match="one function"):
        attribute_edges(model, corrupted, clean, metric={"a": metric}, check=False)
    with pytest.raises(KeyError, match=r"did you mean 'L0H1'"):
        patch_edges(model, corrupted, clean, metric=metric, edges=[("L0H11", "logits")])
    with pytest.raises(ValueError, match="does not come after the writer"):
        patch_edges(model, corrupted, clean, metric=metric, edges=[("m3", "L1H0<q>")])
    with pytest.raises(ValueError, match="edges is empty"):
        patch_edges(model, corrupted, clean, metric=metric, edges=[])
    for refused in (attribute_edges, patch_edges):
        with pytest.raises(TypeError, match="got a HookedRootModule"):
            refused(HookedRootModule(), corrupted, clean, metric=metric)


def test_a_stream_that_is_no_sum_is_refused():
    model = copy.deepcopy(hooked(next(case for case in DECODER_CASES if case.family == "doge")))
    runs = prompts_of(model)
    for refused in (attribute_edges, patch_edges):
        with pytest.raises(ValueError, match="multiplies the numbers of the stream by different weights"):
            refused(model, *runs, metric=last_logits)


def test_a_stream_of_which_that_is_not_known_is_refused_when_it_is_seen(monkeypatch: pytest.MonkeyPatch):
    model = copy.deepcopy(hooked(next(case for case in DECODER_CASES if case.family == "gemma4_text")))
    monkeypatch.setattr(Node, "weight", 1.0)  # as if nothing multiplied the stream
    for refused in (attribute_edges, patch_edges):
        with pytest.raises(ValueError, match="not the sum of what the writers"):
            refused(model, *prompts_of(model), metric=last_logits)


@pytest.mark.parametrize("site", ["blocks.1.ln1.hook_normalized", "blocks.1.hook_q_input", "blocks.0.hook_mlp_in"])
def test_hooks_are_refused_where_edges_are_exchanged_and_kept_elsewhere(site: str):
    model = model_of("gpt2")
    runs = prompts_of(model)
    with model.hooks(fwd_hooks=[(site, lambda value, hook: 0.5 * value)]):
        with pytest.raises(ValueError, match="a hook is open"):
            patch_edges(model, *runs, metric=last_logits, edges=[("input", "logits")], progress=False)
        with pytest.raises(ValueError, match="a hook is open"):
            attribute_edges(model, *runs, metric=last_logits, check=False)
    plain = attribute_edges(model, *runs, metric=last_logits, check=False)
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", lambda value, hook: 0.5 * value)]), torch.no_grad():
        changed = attribute_edges(model, *runs, metric=last_logits, check=False)
        assert_close(changed.corrupted, last_logits(model(runs[0])).float())
    assert (changed.values - plain.values).abs().nan_to_num().max() > 1e-4


def test_inference_mode_is_refused_for_what_it_is():
    model = model_of("gpt2")
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        attribute_edges(model, *prompts_of(model), metric=last_logits)
