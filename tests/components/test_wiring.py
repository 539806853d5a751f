"""The wiring of blocks: it predicts the values of every family, a wrong one does not, and the graph of a run adds up the same."""

import copy
import inspect
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.components import verification
from hooked_lm.components.blocks.block import Block
from hooked_lm.components.blocks.wiring import InStream, Sublayer, Sum, Wiring
from hooked_lm.components.verification import weights_after_norms
from hooked_lm.hooks import HookPoint
from hooked_lm.models.verification import verify
from tests.components.modules import modules
from tests.components.wired import Mark, Recorded, added_up, corrupted, problems, recorded
from tests.core import marks
from tests.families import CASES, VISION_CASES
from tests.families._case import Case
from tests.families._models import hooked
from tests.families._vision import hooked_any
from tests.unchecked import unchecked

# The first line of each family, and lines of the classes of blocks that these lack.
FIRST = {case.family: case for case in reversed([*CASES, *VISION_CASES])}
OF_OTHER_CLASSES = ("bloom-normed-residuals", "deberta-v2-masked-new-head-conv", "mobilebert-texts-wide-layer-norm")
LINES = [*FIRST.values(), *(case for case in CASES if str(case) in OF_OTHER_CLASSES)]
BY_HAND = {"AltUpBlock", "HyperBlock", "HashHyperBlock"}  # no steps at all


def params(cases: Any) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=marks(case.family)) for case in cases]


def model_of(case: Case) -> Any:
    return hooked(case) if case in CASES else hooked_any(case)


@torch.no_grad()
@pytest.mark.parametrize("case", params(LINES))
def test_it_predicts_the_values_at_the_sites(case: Case) -> None:
    found = recorded(model_of(case))
    assert found
    for of in found:
        wiring = of.block.wiring()
        assert [*problems(of, wiring)] == [], f"{of.name}, a {type(of.block).__name__}"
        assert bool(wiring.steps) == (type(of.block).__name__ not in BY_HAND)
        assert wiring.steps or wiring.by_hand


@torch.no_grad()
@pytest.mark.parametrize("case", params(LINES))
def test_each_site_of_a_block_is_in_an_identity(case: Case) -> None:
    """Also those of what it computes besides its wiring; those inside its parts are the parts' own."""
    for of in recorded(model_of(case)):
        seen: set[str] = set()

        def at(site: str, of: Recorded = of, seen: set[str] = seen) -> torch.Tensor:
            seen.add(site)
            return of.at(site)

        for name, pair in verification.identities(of.block, at, *of.given):
            assert verify.error_of(pair) < 1e-4, f"{of.name}: {name}"
        points = [
            name for name, point in of.block.named_modules() if isinstance(point, HookPoint) and not point.on_demand
        ]
        parts = {name for name, module in of.block.named_children() if verification.is_known(module)}
        assert {name for name in points if name.split(".")[0] not in parts} <= seen, of.name


@torch.no_grad()
@pytest.mark.parametrize("case", params(LINES))
def test_a_wrong_wiring_is_noticed(case: Case) -> None:
    """Each field of each step, in one block of each class."""
    for of in {type(of.block): of for of in recorded(model_of(case))}.values():
        for name, wrong in corrupted(of.block, of.block.wiring()):
            assert is_noticed(of, wrong), f"{of.name}: {name}"


def is_noticed(of: Recorded, wrong: Wiring) -> bool:
    try:
        return any(problems(of, wrong))
    except (TypeError, RecursionError):  # a part lacks an input, or a value is made of itself
        return True


@pytest.mark.parametrize("case", params(LINES))
def test_a_run_adds_up_what_the_wiring_says(case: Case) -> None:
    """Read off the graph that autograd records, which knows no block: from a marked sum back to marked values."""
    model = copy.deepcopy(model_of(case)).requires_grad_(True)
    wirings = {name: module.wiring() for name, module in model.named_modules() if isinstance(module, Block)}
    sites = {
        f"{name}.{value}"
        for name, wiring in wirings.items()
        for step in wiring.steps
        for value in values_of(step)
        if f"{name}.{value}" in model.hook_dict
    }
    if not sites:
        assert all(wiring.by_hand for wiring in wirings.values())
        return
    nodes: dict[Any, str] = {}

    def mark(value: Any, hook: Any) -> Any:
        if not value.requires_grad:
            return value
        marked = Mark.apply(value)
        nodes[marked.grad_fn] = hook.name
        return marked

    with model.hooks([(sorted(sites), mark)]), unchecked(), torch.enable_grad():
        recorded_output = run(model, case)
    assert recorded_output is not None
    of_site = {name: node for node, name in nodes.items()}
    for name, wiring in wirings.items():
        for step in wiring.sums:
            if (node := of_site.get(f"{name}.{step.gives}")) is None:
                continue
            expected = {part for value in (step.stream, *step.terms) for part in parts_of(name, wiring, value, of_site)}
            assert added_up(node, nodes) == expected, f"{name}: {step}"


NAMED = {
    "minimax-one-to-one-weighted": "1.7 * resid_pre + 0.8 * attn_out == resid_mid",
    "granitemoe-grouped": "attn(ln1(resid_pre)) * 0.7 == attn_out",
    "doge-grouped": "weighted(mlp, resid_mid) + mlp_out == resid_post",
    "gemma2-grouped": "ln2_post(mlp(ln2(resid_mid))) == mlp_out",
    "gemma4_text-everything": "(resid_mid + mlp_out + per_layer_out) * scale == resid_post",
    "bloom-normed-residuals": "ln1(resid_pre) + attn_out == resid_mid",
    "mobilebert-masked-narrow": "ffn.0.ln(ffn.0.resid_post) == ffn.0.normalized_resid_post",
    "longcat_flash-three-identities": "mlp(ln2(resid_mid)) + shortcut_out == mlp_out",
    "t5gemma-narrow-decoder": "decoder: ln2_post(cross_attn(ln2(resid_mid), source)) == cross_attn_out",
}


@torch.no_grad()
@pytest.mark.parametrize("case", params(case for case in CASES if str(case) in NAMED))
def test_identities_are_named_by_the_formulas_of_their_steps(case: Case) -> None:
    with unchecked():
        report = model_of(case).verify()
    assert report.ok, str(report)
    assert report[NAMED[str(case)]].ok


QKV, GATED = {"W_Q", "W_K", "W_V"}, {"W_in", "W_gate"}
LATENT, ROUTED = {"W_DQ", "W_DKV", "W_KR"}, {"W_router", *GATED}
AFTER_NORMS = {
    "gpt2-tied": {"blocks.0": {"ln1": QKV, "ln2": {"W_in"}}},
    "gptj-half-rotary": {"blocks.0": {"ln1": {*QKV, "W_in"}}},  # one norm for attention and MLP
    "bloom-normed-residuals": {"blocks.0": {}},  # the outputs of norms are the stream
    "bert-masked": {"blocks.0": {}},
    "longcat_flash-no-identities-biased-tied": {"blocks.0": {"ln1": LATENT, "ln2": ROUTED}},
    "longcat_flash-three-identities": {
        "blocks.0": {"ln1": LATENT, "ln2": set()},
        "blocks.1": {"ln1": LATENT, "ln2": GATED},
    },
    "gemma3n_text-everything": {"blocks.0": {"ln1": set(), "ln2": GATED}},  # what ln1 gives is added, too
    "zamba-two-applications": {"blocks.1": {"ln3": {"W_x", "W_gate"}}},  # the other norms belong to several blocks
    "pegasus_x-staggered": {
        "encoder.0": {"ln1": set(), "ln1_global": set(), "ln2": {"W_in"}},
        "decoder.0": {"ln1": QKV, "ln2": {"W_Q"}, "ln3": {"W_in"}},
    },
}


@pytest.mark.parametrize("case", params(case for case in CASES if str(case) in AFTER_NORMS))
def test_the_weights_after_the_norms_of_a_block(case: Case) -> None:
    model = model_of(case)
    for name, expected in AFTER_NORMS[str(case)].items():
        found = weights_after_norms(model.get_submodule(name))
        assert {norm: {weight for _, weight, _ in weights} for norm, weights in found} == expected


def values_of(step: Any) -> list[str]:
    if isinstance(step, Sublayer):
        return [step.reads, step.writes]
    return [step.of, step.gives] if isinstance(step, InStream) else [step.gives, step.stream, *step.terms]


def parts_of(name: str, wiring: Wiring, value: str, of_site: dict[str, Any]) -> set[str]:
    """The marked values in a sum; "?" for one that a norm or a sublayer makes without a site."""
    if f"{name}.{value}" in of_site:
        return {f"{name}.{value}"}
    step = wiring.place(value)
    if isinstance(step, Sum):
        return {part for each in (step.stream, *step.terms) for part in parts_of(name, wiring, each, of_site)}
    return {"?"}


def run(model: Any, case: Case) -> Any:
    """A run of the model on the inputs of `verify`, within the hooks and with gradients."""
    found: list[Any] = []

    def only_once(model: Any, inputs: Any, names: list[str], **masks: Any) -> Any:
        with torch.enable_grad():
            found.append(model(*inputs, **masks))
        raise StopIteration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "run_recorded", only_once)
        with pytest.raises(StopIteration):
            model.verify()
    return found[0]


def all_blocks() -> list[type[Block]]:
    """The classes of blocks, of components and of families."""
    classes = {
        kind
        for module in modules()
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Block)
    }
    return sorted((kind for kind in classes if not inspect.isabstract(kind)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", all_blocks(), ids=lambda kind: kind.__name__)
def test_who_writes_a_forward_says_its_wiring(kind: type[Block]) -> None:
    """In the same class, so that the two are read together."""
    of_forward = next(each for each in kind.__mro__ if "forward" in vars(each))
    of_wiring = next(each for each in kind.__mro__ if "wiring" in vars(each))
    assert issubclass(of_wiring, of_forward), f"{kind.__name__}.forward is not beside its wiring"


@pytest.mark.slow
def test_every_class_of_blocks_occurs() -> None:
    """So that each wiring is compared with values."""
    found = {type(module) for case in LINES for module in model_of(case).modules() if isinstance(module, Block)}
    assert {*all_blocks()} == found


def test_what_is_read_from_a_wiring() -> None:
    model = HookedTransformer.from_pretrained("demo")
    wiring = model.blocks[1].wiring()
    assert [step.part for step in wiring.sublayers] == ["attn", "mlp"]
    assert wiring.of("mlp") == wiring.readers_of("ln2")[0]
    assert wiring.of("mixer") is None
    assert wiring.terms_of("hook_resid_mid") == ("hook_resid_pre", "hook_attn_out")
    assert wiring.terms_of("hook_resid_pre") == ("hook_resid_pre",)
    normed = Wiring((Sublayer("attn", "a", "b"), InStream("ln1", "a", "c"), Sum("d", "c", ("b",))))
    assert normed.terms_of("d") is None
