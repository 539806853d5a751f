"""Every value of a run, in both libraries: sites and their order, gradients, hooks, losses, cached and generated text."""

import copy
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from originals import DECODERS, NAMES, TOYS, Pair, assert_close, distance, pair
from torch import Tensor

from tests.close import GRADIENT, is_close

# Sites of a cache without a filter. Theirs alone: ours has them when they are named.
UNEMBED = {"unembed.hook_in", "unembed.hook_out"}
EXPERTS = {f"mlp.experts.{e}.hook_{name}" for e in range(4) for name in ("gate", "pre", "post")}
ONLY_THEIRS = {"mixtral": UNEMBED | {f"blocks.{i}.{site}" for i in range(2) for site in EXPERTS}}
# Ours alone: places that the original computes, and has no name for.
HEADS = {"mlm_head.hook_pre", "mlm_head.hook_post", "pooler.hook_pooler_out", "nsp_head.hook_nsp_out"}
ONLY_OURS = {
    "mixtral": {f"blocks.{i}.mlp.hook_router_logits" for i in range(2)},
    "bert": HEADS | {f"blocks.{i}.hook_normalized_resid_mid" for i in range(2)},
    "t5": {f"{side}_rel_pos_bias.hook_bias" for side in ("encoder", "decoder")}
    | {"hook_decoder_embed", "hook_encoder_out"},
}
# The one place where the same sites come in another order: BERT adds the types' embeddings before the positions', and so do we.
OTHER_ORDER = {"bert": {"embed.hook_token_type_embed"}}
ROUTING = ("hook_expert_weights", "hook_expert_indices")  # compared in a test of their own
MISSLICED = ("hook_rot_q", "hook_rot_k")
CAUSAL = [*DECODERS, *TOYS]
LEARNED = ["gpt2", *TOYS]  # positions


def run(both: Pair, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Output and cache of ours, then of theirs."""
    with torch.set_grad_enabled(options.get("incl_bwd", False)):
        ours, theirs = (model.run_with_cache(*both.inputs, **options) for model in both.both)
    return *ours, *theirs


def common(ours: Any, theirs: Any, drop: Callable[[str], bool]) -> list[str]:
    """The sites that both have, in their order, which must be one."""
    in_ours = [name for name in ours if name in set(theirs) and not drop(name)]
    in_theirs = [name for name in theirs if name in set(ours) and not drop(name)]
    assert in_ours == in_theirs
    return in_ours


@pytest.mark.parametrize("name", NAMES)
def test_every_site_of_a_bare_cache(name: str):
    both = pair(name)
    logits, ours, original_logits, theirs = run(both)
    assert 0.1 < logits.std() < 10, "logits of no size say nothing"
    assert_close(logits, original_logits)
    assert set(theirs) - set(ours) == ONLY_THEIRS.get(name, UNEMBED)
    assert set(ours) - set(theirs) == ONLY_OURS.get(name, set())
    names = common(ours, theirs, lambda site: site in OTHER_ORDER.get(name, ()))
    for site in {*names, *OTHER_ORDER.get(name, ())}:
        if not site.endswith(ROUTING):
            assert_close(ours[site], theirs[site], site)
    assert len(names) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_sites_that_ours_has_on_demand(name: str):
    both = pair(name)
    with torch.no_grad():
        _, ours = both.ours.run_with_cache(*both.inputs, names_filter=lambda site: site in UNEMBED)
    assert list(ours) == sorted(UNEMBED)
    # T5's tied unembedding has a factor: theirs scales what is unembedded, ours the product.
    factor = both.ours.cfg.d_model**-0.5 if name == "t5" else 1.0
    for site in UNEMBED:
        assert_close(ours[site] * factor, run(both)[3][site], site)


def test_experts_have_the_names_of_gated_mlps():
    """Theirs calls the gate's pre-activation `hook_gate` and the other branch `hook_pre`, though in its gated MLPs `hook_pre` is
    the gate's; ours has the names of gated MLPs in both."""
    both = pair("mixtral")
    with torch.no_grad():
        _, ours = both.ours.run_with_cache(*both.inputs, names_filter=lambda site: ".experts." in site)
    _, bare, _, theirs = run(both)
    renamed = {"hook_gate": "hook_pre", "hook_pre": "hook_pre_linear", "hook_post": "hook_post"}
    for site in sorted(ONLY_THEIRS["mixtral"] - UNEMBED):
        expert, _, leaf = site.rpartition(".")
        # Theirs has the tokens whose first choice the expert was before those whose second; ours has them in their order.
        choices = theirs[f"{expert.partition('.experts')[0]}.hook_expert_indices"] == int(expert[-1])
        order = torch.cat([choices[:, slot].nonzero()[:, 0] for slot in range(2)]).argsort()
        assert_close(ours[f"{expert}.{renamed[leaf]}"], theirs[site][order], site)
    for i in range(2):
        layer = f"blocks.{i}.mlp."
        assert torch.equal(bare[layer + "hook_expert_indices"].flatten(0, 1), theirs[layer + "hook_expert_indices"])
        # Theirs shows the shares of all experts before the best are chosen, ours those with which they are added.
        chosen = theirs[layer + "hook_expert_weights"].gather(1, theirs[layer + "hook_expert_indices"])
        assert_close(bare[layer + "hook_expert_weights"].flatten(0, 1), chosen / chosen.sum(1, keepdim=True))
        shares = bare[layer + "hook_router_logits"].flatten(0, 1).softmax(-1)
        assert_close(shares, theirs[layer + "hook_expert_weights"])


# ---- sites behind flags ----------------------------------------------------------------------------------------------


def with_flags(both: Pair, *flags: str) -> Pair:
    ours, theirs = copy.deepcopy(both.ours), copy.deepcopy(both.theirs)
    for model in (ours, theirs):
        for flag in flags:
            setter = getattr(model, f"set_{flag}", None)
            setter(True) if setter else setattr(model.cfg, flag, True)
    return Pair(both.name, ours, theirs, both.inputs)


SPLIT = ("use_split_qkv_input",)
FLAGS = {
    **{(name, flags): None for name in CAUSAL for flags in (SPLIT, ("use_attn_result", "use_hook_mlp_in"))},
    **{(name, ("use_attn_in",)): None for name in ("gpt2", "neox", *TOYS)},
    **{("bert", (flag,)): None for flag in ("use_attn_result", *SPLIT)},
    ("t5", ("use_attn_result",)): None,
}


@pytest.mark.parametrize(("name", "flags"), FLAGS)
def test_sites_that_a_flag_asks_for(name: str, flags: tuple[str, ...]):
    """With copies of the stream for each head the norm normalises each copy: its sites have an axis of heads."""
    attn_only = name in TOYS and name != "toy-solu"
    both = with_flags(pair(name), *(flag for flag in flags if not (attn_only and flag == "use_hook_mlp_in")))
    _, plain, _, _ = run(pair(name))
    logits, ours, original_logits, theirs = run(both)
    assert_close(logits, original_logits)
    assert len(ours) > len(plain)
    assert set(theirs) - set(ours) == ONLY_THEIRS.get(name, UNEMBED)
    other_order = OTHER_ORDER.get(name, set())
    for site in common(ours, theirs, lambda site: site in other_order):
        if not site.endswith(ROUTING):
            assert_close(ours[site], theirs[site], site)


def test_what_the_mlp_of_a_post_norm_block_reads():
    """Theirs has `hook_mlp_in` before the norm that stands in BERT's stream, where an edit changes the stream itself and not what
    the MLP alone reads; ours has it where the MLP reads."""
    both = with_flags(pair("bert"), "use_hook_mlp_in")
    _, ours, _, theirs = run(both)
    assert_close(theirs["blocks.0.hook_mlp_in"], theirs["blocks.0.hook_resid_mid"])
    assert_close(ours["blocks.0.hook_mlp_in"], ours["blocks.0.hook_normalized_resid_mid"])

    def added(model: Any) -> Tensor:
        """To what the MLP's output is added, where its input is set to 0."""

        zero = ("blocks.0.hook_mlp_in", lambda value, hook: torch.zeros_like(value))
        with torch.no_grad(), model.hooks([zero]):
            _, cache = model.run_with_cache(*both.inputs)
        return cache["blocks.0.hook_resid_post"] - cache["blocks.0.hook_mlp_out"]

    assert_close(added(both.ours), ours["blocks.0.hook_normalized_resid_mid"])
    assert distance(added(both.theirs), ours["blocks.0.hook_normalized_resid_mid"]) > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral"])
def test_attention_inputs_of_grouped_heads(name: str):
    """Theirs refuses `use_attn_in` in grouped-query models; ours has the site."""
    both = pair(name)
    with pytest.raises(AssertionError):
        copy.deepcopy(both.theirs).set_use_attn_in(True)
    with torch.no_grad():
        _, ours = both.ours.run_with_cache(*both.inputs, names_filter="blocks.1.hook_attn_in")
        resid = run(both)[3]["blocks.1.hook_resid_pre"]
    assert_close(ours["blocks.1.hook_attn_in"], resid[:, :, None].expand(-1, -1, 4, -1))


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients(model: Any, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Values, and gradients of a random weighing of the logits, by `add_caching_hooks`."""
    cache = model.add_caching_hooks(incl_bwd=True)
    try:
        logits = model(*inputs)
        (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    finally:
        model.reset_hooks()
        model.zero_grad()
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_a_cache(name: str):
    """Also through `run_with_cache(incl_bwd=True)`, for models that have a loss."""
    both = pair(name)
    found = [(gradients(both.ours, both.inputs), gradients(both.theirs, both.inputs))]
    if name in CAUSAL:
        _, ours, _, theirs = run(both, incl_bwd=True, return_type="loss")
        found.append((ours, theirs))
        for model in both.both:
            model.zero_grad()
    # The first norm of a block: see the next test.
    skipped = () if name == "bert" else ("ln1.hook_normalized_grad", "ln1.hook_scale_grad")
    for ours, theirs in found:
        names = common(ours, theirs, lambda site: site.removesuffix("_grad") in OTHER_ORDER.get(name, ()))
        for site in names:
            if not site.removesuffix("_grad").endswith(ROUTING) and not site.endswith(skipped):
                assert_close(ours[site], theirs[site], site, GRADIENT)
        assert sum(site.endswith("_grad") for site in names) >= 20


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_the_gradient_at_the_first_norm_is_all_of_it(name: str):
    """Theirs computes that norm three times, for queries, keys and values: its cache holds the gradient of one of them, the
    three add up to ours."""
    both = pair(name)
    site = "blocks.1.ln1.hook_normalized"
    ours, theirs = (gradients(model, both.inputs)[site + "_grad"] for model in both.both)
    parts: list[Tensor] = []
    both.theirs.add_hook(site, lambda grad, hook: parts.append(grad.clone()), "bwd")
    gradients(both.theirs, both.inputs)
    assert len(parts) == 3
    assert distance(ours, theirs) > 0.01
    assert_close(ours, sum(parts), depth=GRADIENT)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def logged(model: Any, tokens: Tensor) -> list[str]:
    """The order in which hooks of every kind run, forwards and backwards."""
    log: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda value, hook: log.append(f"{word} {hook.name}")

    model.add_hook("blocks.0.hook_resid_mid", note("first"))
    model.add_hook("blocks.0.hook_resid_mid", note("second"))
    model.add_hook("blocks.0.hook_resid_mid", note("prepended"), prepend=True)
    model.add_perma_hook("blocks.1.attn.hook_z", note("permanent"))
    model.add_hook(lambda name: name.endswith("hook_pattern"), note("by predicate"))
    for direction in ("first backward", "second backward"):
        model.add_hook("blocks.1.hook_mlp_out", note(direction), "bwd")
    model.run_with_hooks(
        tokens,
        return_type="loss",
        fwd_hooks=[("blocks.0.hook_resid_mid", note("scoped")), (lambda name: name.endswith("z"), note("all z"))],
        bwd_hooks=[],
        reset_hooks_end=False,
    ).backward()
    model.reset_hooks()
    log.append("reset")
    with model.hooks([("blocks.0.attn.hook_q", note("outer"))], reset_hooks_end=True):
        with model.hooks([("blocks.0.attn.hook_q", note("inner"))], [("blocks.0.attn.hook_q", note("inner backward"))]):
            model(tokens, return_type="loss").backward()
            log.append("inner ends")
        model(tokens)
    model(tokens)
    model.reset_hooks(including_permanent=True)
    model(tokens)
    model.zero_grad()
    return log


def test_hooks_run_in_the_same_order():
    both = pair("gpt2")
    ours, theirs = (logged(model, *both.inputs) for model in both.both)
    assert Counter(ours) == Counter(theirs)
    assert ours == theirs


@pytest.mark.parametrize("name", CAUSAL)
def test_hooks_that_change_values(name: str):
    both = pair(name)
    gain = torch.linspace(0.5, 1.5, 9)

    def scaled(value: Tensor, hook: Any) -> Tensor:
        return value * gain.view(1, -1, *[1] * (value.ndim - 2))

    def doubled_in_place(value: Tensor, hook: Any) -> None:
        value[:, :, 1] *= 2

    hooks = [
        ("blocks.0.hook_resid_post", scaled),
        ("blocks.1.attn.hook_v", doubled_in_place),
        ("blocks.1.attn.hook_pattern", lambda value, hook: value.roll(1, 0)),
        ("blocks.1.hook_attn_out", scaled),
    ]
    with torch.no_grad():
        ours, theirs = (model.run_with_hooks(*both.inputs, fwd_hooks=hooks) for model in both.both)
        plain = both.ours(*both.inputs)
    assert_close(ours, theirs)
    assert distance(ours, plain) > 0.1


# ---- losses, parts of a run, generation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_losses(name: str):
    both, mask = pair(name), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    for options in (
        {"return_type": "loss"},
        {"return_type": "loss", "loss_per_token": True},
        {"return_type": "both"},
        {"return_type": "both", "loss_per_token": True},
        {"return_type": "loss", "attention_mask": mask},
        {"return_type": "loss", "loss_per_token": True, "attention_mask": mask},
    ):
        with torch.no_grad():
            ours, theirs = (model(*both.inputs, **options) for model in both.both)
        if options["return_type"] == "both":
            assert_close((ours.logits, ours.loss), (theirs.logits, theirs.loss), options)
        else:
            assert_close(ours, theirs, options)


@pytest.mark.parametrize("name", CAUSAL)
def test_parts_of_a_run(name: str):
    both = pair(name)
    with torch.no_grad():
        for start, stop in ((None, 1), (None, -1), (None, 0), (1, None), (-1, None), (0, 1)):
            given = both.inputs[0]
            if start is not None:
                given = both.theirs(given, stop_at_layer=start)
            if name == "toy-shortformer" and start is not None:
                positions = both.theirs.input_to_embed(both.inputs[0])[2]
                options = {"shortformer_pos_embed": positions}
            else:
                options = {}
            ours, theirs = (m(given, start_at_layer=start, stop_at_layer=stop, **options) for m in both.both)
            assert_close(ours, theirs, (start, stop))
        ours, theirs = (m.input_to_embed(*both.inputs) for m in both.both)
        assert_close(ours[:3], theirs[:3])
        for part in ({"names_filter": lambda n: n.endswith("z")}, {"pos_slice": (2, 5)}, {"pos_slice": -1}):
            ours, theirs = (m.run_with_cache(*both.inputs, **part)[1] for m in both.both)
            for site in common(ours, theirs, lambda site: site.endswith((*ROUTING, *MISSLICED))):
                assert_close(ours[site], theirs[site], (site, part.keys()))


@pytest.mark.parametrize("name", ["neox", "llama", "gemma2"])
def test_positions_of_rotated_queries_and_keys(name: str):
    """Theirs tells the axis of positions from the end of a site's name, and of `hook_rot_q` and `hook_rot_k` slices the heads."""
    both = pair(name)
    _, ours, _, theirs = run(both, pos_slice=(1, 3))
    _, whole, _, _ = run(both)
    for site in ("blocks.0.attn.hook_rot_q", "blocks.1.attn.hook_rot_k"):
        assert_close(ours[site], whole[site][:, 1:3], site)
        assert theirs[site].shape[1] == 9


GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "verbose": False, "return_type": "tokens"}


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_generation(name: str):
    """With the key/value cache and without; rows that meet the end token are filled with it."""
    both = pair(name)
    for cached in (True, False):
        if name in LEARNED and cached:
            continue  # the next test
        options = {**GREEDY, "use_past_kv_cache": cached}
        ours, theirs = (model.generate(*both.inputs, **options, stop_at_eos=False) for model in both.both)
        assert torch.equal(ours, theirs)
        end = int(ours[0, 11])
        ours, theirs = (model.generate(*both.inputs, **options, eos_token_id=end) for model in both.both)
        assert torch.equal(ours, theirs)
        assert (ours[:, 9:] == end).any()


@pytest.mark.parametrize("name", LEARNED)
def test_greedy_generation_with_a_cache_and_learned_positions(name: str):
    """Theirs counts cached tokens twice where positions are learned and ids are given, so it generates something else with its
    cache than without (a shortformer fails); ours gives what it gives without."""
    both = pair(name)
    expected = both.theirs.generate(*both.inputs, **GREEDY, stop_at_eos=False, use_past_kv_cache=False)
    assert torch.equal(both.ours.generate(*both.inputs, **GREEDY, stop_at_eos=False), expected)
    try:
        theirs = both.theirs.generate(*both.inputs, **GREEDY, stop_at_eos=False)
    except RuntimeError:
        assert name == "toy-shortformer"
    else:
        assert not torch.equal(theirs, expected)


def test_greedy_generation_of_an_encoder_decoder(monkeypatch: pytest.MonkeyPatch):
    """Theirs has no key/value cache there, and asks a tokenizer for the token that begins."""
    both = pair("t5")
    source = both.inputs[0]
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    monkeypatch.setattr(both.theirs, "tokenizer", tokenizer, raising=False)
    expected = both.theirs.generate(source, torch.ones_like(source), **GREEDY, stop_at_eos=False)
    for cached in (True, False):
        ours = both.ours.generate(source, **GREEDY, stop_at_eos=False, use_past_kv_cache=cached)
        assert torch.equal(ours, expected)


# ---- negative control ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "toy-ln"])
def test_one_weight_that_differs_is_seen(name: str):
    both = pair(name)
    changed = Pair(name, copy.deepcopy(both.ours), both.theirs, both.inputs)
    with torch.no_grad():
        changed.ours.blocks[1].attn.W_V[0, 0, 0] += 0.05
    _, ours, _, theirs = run(changed)
    apart = [site for site in theirs if site in set(ours) and not is_close(ours[site], theirs[site])]
    assert apart[:1] == ["blocks.1.attn.hook_v"]
