"""What a model lists beside the original's lists: state dict, parameters, modules, hook points. Every difference is in a table
here, with its reason."""

import copy
import re
from typing import Any

import originals
import pytest
import torch
from torch import nn

import hooked_lm
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.select import site_glob
from tests.close import assert_apart, assert_close

# Names of theirs -> ours.
RENAMED = [
    (r"\._([Wb]_[KV])$", r".\1"),  # grouped keys and values
    (r"\.mlp\.W_gate\.weight$", ".mlp.W_router"),
    (r"(\.experts\.\d+\.W_\w+)\.weight$", r"\1"),
    (r"^(encoder|decoder)\.0\.attn\.rel_pos_bias\.weight$", r"\1_rel_pos_bias.W_rel"),
]
EXPERT = "blocks.*.mlp.experts.*."


def in_our_names(names: Any) -> list[str]:
    for pattern, ours in RENAMED:
        names = [re.sub(pattern, ours, name) for name in names]
    return list(names)


def globs(names: Any) -> set[str]:
    """Each name with stars for layers and experts."""
    return {site_glob(name) for name in names}


def common(ours: list[str], theirs: list[str], *skipped: str) -> tuple[list[str], list[str]]:
    """The names that both list, in either order."""
    both = {*ours} & {*theirs} - {*skipped}
    return [name for name in ours if name in both], [name for name in theirs if name in both]


# ---- state dicts -----------------------------------------------------------------------------------------------------

ROTARY = {f"blocks.*.attn.rotary_{leaf}" for leaf in ("sin", "cos")}  # angles are made anew in each run
# Theirs has every bias, as zeros; ours those of the checkpoint.
NO_BIAS = {f"blocks.*.{leaf}" for leaf in ("attn.b_O", "mlp.b_in", "mlp.b_out")} | {"unembed.b_U"}
NO_ATTN_BIAS = {f"blocks.*.attn.b_{leaf}" for leaf in "QKV"}
T5_BIASES = {
    *(f"{side}.*.attn.b_{leaf}" for side in ("encoder", "decoder") for leaf in "QKVO"),
    *(f"decoder.*.cross_attn.b_{leaf}" for leaf in "QKVO"),
    *(f"{side}.*.mlp.{leaf}" for side in ("encoder", "decoder") for leaf in ("b_in", "b_out")),
    "unembed.b_U",
}
ONLY_IN_THEIR_STATE: dict[str, set[str]] = {
    "gpt2": {"unembed.b_U"},
    "neox": {"unembed.b_U"} | ROTARY,
    "llama": NO_BIAS | NO_ATTN_BIAS | ROTARY,
    "qwen2": NO_BIAS | ROTARY,
    "gemma2": NO_BIAS | NO_ATTN_BIAS | ROTARY,
    "mixtral": (NO_BIAS | NO_ATTN_BIAS | ROTARY) - {"blocks.*.mlp.b_in", "blocks.*.mlp.b_out"},
    "t5": T5_BIASES,
}


@pytest.mark.parametrize("name", originals.NAMES)
def test_keys_of_state_dicts(name: str) -> None:
    """Only theirs has tables of rotary angles and biases of zeros; nothing is in ours alone."""
    pair = originals.pair(name)
    there = pair.theirs.state_dict()
    ours, theirs = set(pair.ours.state_dict()), set(in_our_names(there))
    assert ours - theirs == set()
    assert globs(theirs - ours) == ONLY_IN_THEIR_STATE.get(name, set())
    for key, value in there.items():
        if in_our_names([key])[0] not in ours and "rotary" not in key:
            assert not value.any(), key


@pytest.mark.parametrize("name", originals.NAMES)
def test_a_state_dict_of_theirs_loads_strictly(name: str) -> None:
    """Into the same model; Gemma's into one of the same flat config, as the loaded one keeps the checkpoint's weights, and its
    factor and 1 + in the components."""
    pair = originals.pair(name)
    ours = hooked_lm.HookedTransformer(originals.FLAT_GEMMA2) if name == "gemma2" else copy.deepcopy(pair.ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
        result = ours.load_state_dict(pair.theirs.state_dict(), strict=True)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_close(ours(*pair.inputs), pair.theirs(*pair.inputs))


# ---- parameters ------------------------------------------------------------------------------------------------------

# Ours come as they are computed: BERT adds types before positions and pools before it classifies; the position bias that T5's
# layers share stands before them (there in the first). A tied unembedding is the embedding.
OTHER_PLACE = {
    "bert": ("embed.token_type_embed.W_token_type", "pooler.W", "pooler.b"),
    "t5": ("encoder_rel_pos_bias.W_rel", "decoder_rel_pos_bias.W_rel"),
}


@pytest.mark.parametrize("name", originals.NAMES)
def test_parameters_come_in_the_same_order(name: str) -> None:
    pair = originals.pair(name)
    ours, theirs = ([n for n, _ in model.named_parameters()] for model in pair.both)
    assert set(ours) <= set(in_our_names(theirs))
    ours, theirs = common(ours, in_our_names(theirs), *OTHER_PLACE.get(name, ()))
    assert ours == theirs
    assert len(ours) > 9


# ---- modules and hook points -----------------------------------------------------------------------------------------

UNEMBED = {"unembed.hook_in", "unembed.hook_out"}
FLAGS = {f"blocks.*.{leaf}" for leaf in ("attn.hook_result", *(f"hook_{x}_input" for x in "qkv"), "hook_mlp_in")}
ON_DEMAND = FLAGS | {"blocks.*.hook_attn_in"} | UNEMBED
SIDES = ("encoder", "decoder")
# Points that exist there and are never reached: of MLPs in models without, and of a shortformer's attention.
UNREACHED = {"blocks.*.hook_mlp_in", "blocks.*.hook_mlp_out"}
ONLY_THEIR_MODULES: dict[str, set[str]] = {
    "mixtral": {EXPERT + leaf for leaf in ("W_gate", "W_in", "W_out", "hook_gate")} | {"blocks.*.mlp.W_gate"},
    "bert": {"mlm_head.act_fn", "pooler.activation"},
    "t5": {f"{side}.*.attn.rel_pos_{leaf}" for side in SIDES for leaf in ("bias", "hook")},
    "toy-ln": UNREACHED,
    "toy-bare": UNREACHED,
    "toy-shortformer": UNREACHED | {"blocks.*.attn.hook_attn_input"},
}
MLP_ENDS = {"blocks.*.mlp.hook_in", "blocks.*.mlp.hook_out"}
ROUTER = {"blocks.*.mlp.hook_router_logits"}
BERT_SITES = {"blocks.*.hook_normalized_resid_mid", "mlm_head.hook_pre", "mlm_head.hook_post"}
T5_SITES = {
    *(f"{side}_rel_pos_bias.hook_bias" for side in SIDES),
    *("hook_decoder_embed", "hook_encoder_out"),
}
ONLY_OUR_MODULES: dict[str, set[str]] = {
    "mixtral": MLP_ENDS
    | ROUTER
    | {EXPERT + f"hook_{leaf}" for leaf in ("in", "out", "pre_linear", "routed_positions")},
    "bert": MLP_ENDS | BERT_SITES | {"blocks.*.hook_attn_in"},
    "t5": T5_SITES
    | {f"{side}_rel_pos_bias" for side in SIDES}
    | {f"{side}.*.mlp.hook_{leaf}" for side in SIDES for leaf in ("in", "out")}
    | {"hook_decoder_tokens"},
    **{name: set() for name in ("toy-ln", "toy-bare", "toy-shortformer")},
}


@pytest.mark.parametrize("name", originals.NAMES)
def test_modules_by_name(name: str) -> None:
    pair = originals.pair(name)
    ours, theirs = set(pair.ours.mod_dict), set(pair.theirs.mod_dict)
    assert globs(theirs - ours) == ONLY_THEIR_MODULES.get(name, set())
    assert globs(ours - theirs) == ONLY_OUR_MODULES.get(name, MLP_ENDS) | {"hook_tokens"}
    for model in pair.both:
        assert "" not in model.mod_dict
        assert all(model.get_submodule(path) is module for path, module in model.mod_dict.items())
        assert all(module.name == path for path, module in model.mod_dict.items())


def test_modules_of_a_users_own_class() -> None:
    """The same class on either base: same modules, points and names."""
    listed = []
    for base, point in ((HookedRootModule, HookPoint), (originals.transformer_lens.HookedRootModule, None)):
        point = point or originals.transformer_lens.hook_points.HookPoint

        class Net(base):  # type: ignore[misc, valid-type]
            def __init__(self, point: Any = point) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), point()) for _ in range(2)])
                self.hook_out = point()
                self.setup()

        model = Net()
        names = {path: module.name for path, module in model.mod_dict.items()}
        assert all(path == name for path, name in names.items())
        listed.append((list(names), list(model.hook_dict)))
    assert listed[0] == listed[1]
    assert len(listed[0][0]) == 8


# What iterating over their hook_dict shows besides: points behind flags, and what a bare cache of ours leaves out.
ONLY_THEIR_POINTS: dict[str, set[str]] = {
    "mixtral": ON_DEMAND | {EXPERT + f"hook_{leaf}" for leaf in ("gate", "pre", "post")},
    "bert": FLAGS | UNEMBED,
    "t5": UNEMBED
    | {f"{side}.*.{leaf.removeprefix('blocks.*.')}" for side in SIDES for leaf in ON_DEMAND - UNEMBED}
    | {f"{side}.*.attn.rel_pos_hook" for side in SIDES}
    | {"decoder.*.cross_attn.hook_result", "decoder.*.hook_cross_attn_in"},
    "toy-ln": ON_DEMAND | UNREACHED,
    "toy-bare": ON_DEMAND | UNREACHED,
    "toy-shortformer": ON_DEMAND | UNREACHED | {"blocks.*.attn.hook_attn_input"},
}
ONLY_OUR_POINTS = {"mixtral": ROUTER, "bert": BERT_SITES, "t5": T5_SITES}


@pytest.mark.parametrize("name", originals.NAMES)
def test_hook_points_by_name(name: str) -> None:
    """A loop over ours comes by the sites in the order of computation, as caches of both do; theirs in that of construction."""
    pair = originals.pair(name)
    ours, theirs = list(pair.ours.hook_dict), list(pair.theirs.hook_dict)
    assert globs({*theirs} - {*ours}) == ONLY_THEIR_POINTS.get(name, ON_DEMAND)
    assert globs({*ours} - {*theirs}) == ONLY_OUR_POINTS.get(name, set())
    with torch.no_grad():
        cached = list(pair.theirs.run_with_cache(*pair.inputs)[1])
    late = ("embed.hook_token_type_embed",) if name == "bert" else ()
    ours, computed = common(ours, cached, *late)
    assert ours == computed
    reached = {*theirs} - {"nsp_head.hook_nsp_out", "pooler.hook_pooler_out"}  # of heads that theirs runs apart
    never = {n for n in reached if site_glob(n) not in ONLY_THEIR_POINTS.get(name, ON_DEMAND)} - {*cached}
    assert not never


@pytest.mark.parametrize("name", originals.NAMES)
def test_a_hook_on_every_point(name: str) -> None:
    """A loop that adds a function to each point of `hook_dict` runs it at the sites of the original, once each: theirs also at
    those of the unembedding, and thrice at a first norm, which runs for queries, keys and values there."""
    pair, called = originals.pair(name), []
    for model in pair.both:
        seen: list[str] = []
        for path, point in model.hook_dict.items():
            assert point.name == path
            point.add_hook(lambda value, hook, seen=seen: seen.append(hook.name))
        try:
            with torch.no_grad():
                model(*pair.inputs)
        finally:
            model.reset_hooks()
        called.append(seen)
    ours, theirs = called
    assert len(ours) == len({*ours})
    heads = {"nsp_head.hook_nsp_out", "pooler.hook_pooler_out"} if name == "bert" else set()
    assert globs({*ours} - {*theirs}) == ONLY_OUR_POINTS.get(name, set()) | heads
    experts = {EXPERT + f"hook_{leaf}" for leaf in ("gate", "pre", "post")} if name == "mixtral" else set()
    assert globs({*theirs} - {*ours}) == UNEMBED | experts
    late = ("embed.hook_token_type_embed",) if name == "bert" else ()
    ours, theirs = common(ours, list(dict.fromkeys(theirs)), *late)
    assert ours == theirs


def test_a_hook_on_every_point_that_changes_its_value() -> None:
    """And not only the same sites: what the functions return has the same effect."""
    pair = originals.pair("gpt2")
    logits = []
    for model in pair.both:
        for path, point in model.hook_dict.items():
            if path not in UNEMBED and "ln1" not in path:
                point.add_hook(lambda value, hook: value * 1.01)
        try:
            with torch.no_grad():
                logits.append(model(*pair.inputs))
        finally:
            model.reset_hooks()
    assert_close(*logits)
    with torch.no_grad():
        assert_apart(logits[0], pair.ours(*pair.inputs))
