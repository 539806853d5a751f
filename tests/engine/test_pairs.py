"""Pairs in place of corrupted and clean prompts, everything by keyword, what is ambiguous; and that there is one resolution."""

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer, HookedTransformerConfig, Pairs, VisionInputs, patching
from hooked_lm.analysis import (
    attribute,
    attribute_edges,
    attribute_nodes,
    circuits,
    metrics,
    patch_edges,
    sweep_alignments,
    train_alignment,
)
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.engine.pairs import pair_of
from hooked_lm.engine.study import SwapWarning
from hooked_lm.interventions import steering_vectors, sweep_steering
from hooked_lm.results import Scores
from hooked_lm.studies import study_pairs
from tests.unchecked import unchecked

PACKAGE = Path(hooked_lm.__file__).parent
TASK = prompt_pairs(3)
CLEAN, CORRUPTED = [pair.clean for pair in TASK], [pair.corrupted for pair in TASK]
RIGHT, WRONG = [pair.answer for pair in TASK], [pair.wrong_answer for pair in TASK]
PAIRS = Pairs(CLEAN, CORRUPTED, RIGHT, WRONG)
IDS = Pairs(*torch.randint(11, (2, 3, 5), generator=torch.Generator().manual_seed(1)), [1, 2, 3], [4, 5, 6])
HEADS: dict[str, Any] = {"sites": "z", "positions": None, "heads": "each", "layers": [1]}
ANSWERS = ([1, 2, 3], [4, 5, 6])
EDGES = [("L0H1", "logits"), ("m0", "L1H1<k>")]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo").requires_grad_(False)


@pytest.fixture(scope="module")
def toy() -> HookedTransformer:
    sizes: dict[str, Any] = {
        "n_layers": 2,
        "d_model": 8,
        "n_heads": 2,
        "d_head": 4,
        "n_ctx": 8,
        "d_vocab": 11,
        "d_mlp": 12,
    }
    return HookedTransformer(
        HookedTransformerConfig(**sizes, act_fn="gelu", seed=0, initializer_range=0.5)
    ).requires_grad_(False)


def circuit(model: HookedTransformer) -> circuits.Circuit:
    return circuits.Circuit.of(Graph.of(model), [("input", "m0"), ("m0", "logits"), ("input", "logits")])


# name -> the function of the prompts and the metric, and its other arguments
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sweep": (patching.sweep, HEADS),
    "path_patch": (patching.path_patch, {"receivers": ["L1H0<q>"], "senders": ["L0H1", "m0"]}),
    "head_to_head": (patching.head_to_head, {"inputs": ["q"]}),
    "attribute": (attribute, {**HEADS, "check": 3}),
    "attribute_nodes": (attribute_nodes, {"sites": ["z"], "check": False}),
    "attribute_edges": (attribute_edges, {"check": 2}),
    "patch_edges": (patch_edges, {"edges": EDGES}),
    "acdc": (circuits.acdc, {"threshold": 0.1}),
    "prune": (circuits.prune, {"n_edges": 20, "share": 0.5}),
    "train_masks": (circuits.train_masks, {"n_edges": 20, "steps": 2}),
    "discover": (circuits.discover, {"method": "eap", "n_edges": 20, "check": 2}),
    "null_circuits": (circuits.null_circuits, {"n": 1, "method": "eap", "n_edges": 20, "check": False}),
}
OF_CIRCUITS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "evaluate": (circuits.evaluate, {"n_random": 1}),
    "minimality": (circuits.minimality, {}),
    "exact_effects": (circuits.exact_effects, {}),
}


def numbers(found: Any) -> list[Tensor]:
    """The tensors of a result, or of results by name."""
    if isinstance(found, dict):
        return [tensor for each in found.values() for tensor in numbers(each)]
    return [value for value in vars(found).values() if isinstance(value, Tensor)]


def assert_equal(found: Any, expected: Any) -> None:
    pairs = list(zip(numbers(found), numbers(expected), strict=True))
    assert pairs
    assert all(torch.equal(one.nan_to_num(9.5), other.nan_to_num(9.5)) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:.* hardly differ", "ignore::hooked_lm.engine.study.SwapWarning")  # it is untrained
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs_are_both_prompts_with_the_logit_difference(toy: HookedTransformer, name: str) -> None:
    function, options = FUNCTIONS[name]
    metric = metrics.logit_difference([1, 2, 3], [4, 5, 6])
    expected = function(toy, IDS.corrupted, IDS.clean, metric=metric, progress=False, **options)
    assert_equal(function(toy, IDS, progress=False, **options), expected)
    assert_equal(function(toy, IDS.corrupted, IDS.clean, answers=ANSWERS, progress=False, **options), expected)
    by_name = {"clean": IDS.clean, "corrupted": IDS.corrupted, "metric": metric}
    assert_equal(function(toy, **by_name, progress=False, **options), expected)


@pytest.mark.filterwarnings("ignore:.* hardly differ")
@pytest.mark.parametrize("name", OF_CIRCUITS)
def test_pairs_on_which_a_circuit_is_measured(toy: HookedTransformer, name: str) -> None:
    function, options = OF_CIRCUITS[name]
    metric, both = metrics.logit_difference([1, 2, 3], [4, 5, 6]), (IDS.corrupted, IDS.clean)
    expected = function(toy, circuit(toy), *both, metric=metric, **options)
    assert_equal(function(toy, circuit(toy), IDS, **options), expected)
    assert_equal(function(toy, circuit(toy), *both, answers=ANSWERS, **options), expected)
    by_name = {"clean": IDS.clean, "corrupted": IDS.corrupted, "metric": metric}
    assert_equal(function(toy, circuit(toy), **by_name, **options), expected)
    of_divergence = function(toy, circuit(toy), *both, **options)
    assert_equal(function(toy, circuit(toy), Pairs(IDS.clean, IDS.corrupted), **options), of_divergence)


def test_pairs_of_hooks_of_alignments_and_of_a_runner(toy: HookedTransformer) -> None:
    metric, cells = (
        metrics.logit_difference([1, 2, 3], [4, 5, 6]),
        [patching.Edit("blocks.1.hook_mlp_out", torch.zeros(1))],
    )
    both = IDS.corrupted, IDS.clean
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)
        expected = patching.run_each(toy, both[0], cells, clean=both[1], metric=metric)
        assert_equal(patching.run_each(toy, IDS, cells), expected)
        assert_equal(patching.run_each(toy, both[0], cells, clean=both[1], answers=ANSWERS), expected)
    assert torch.equal(circuits.Runner(toy, IDS).full, circuits.Runner(toy, *both, metric).full)
    assert torch.equal(circuits.Runner(toy, *both, answers=ANSWERS).full, circuits.Runner(toy, *both, metric).full)
    where: dict[str, Any] = {"size": 4, "steps": 1, "progress": False}
    trained = train_alignment(toy, *both, [1, 2, 3], site=("resid_pre", 1), positions=-1, **where)
    assert_equal(train_alignment(toy, IDS, site=("resid_pre", 1), positions=-1, **where).accuracy, trained.accuracy)
    where |= {"layers": [1], "positions": [4]}
    assert_equal(sweep_alignments(toy, IDS, **where), sweep_alignments(toy, *both, [1, 2, 3], **where))


def test_answers_in_place_of_a_metric(model: HookedTransformer) -> None:
    """Of functions without pairs; texts are looked up."""
    prompts, answers = "When Mary and John left, John", (" Mary", " John")
    vectors = steering_vectors(model, ["Mary was ill, so"] * 2, ["Tom was ill, so"] * 2, layers=[1])
    functions: dict[Any, tuple[Any, ...]] = {
        patching.ablate: (prompts, "layers"),
        patching.causal_trace: (prompts, " Mary"),
        patching.attention_knockout: (prompts, {"edge": (2, -1)}),
        hooked_lm.analysis.evaluate: (prompts,),
        partial(sweep_steering, coefficients=[1]): (vectors, prompts),
    }
    for function, given in functions.items():
        expected = function(model, *given, metric=metrics.logit_difference(*answers, model=model))
        assert_equal(function(model, *given, answers=answers), expected)
        with pytest.raises(TypeError, match="metric is missing: give metric="):
            function(model, *given)
    swept = patching.sweep(model, PAIRS, answers=(WRONG, RIGHT), by="layer")
    assert torch.equal(swept.values, -patching.sweep(model, PAIRS, by="layer").values), "given, not those of the pairs"


def test_each_function_of_a_metric_takes_answers() -> None:
    found = 0
    for module in (patching, hooked_lm.analysis, circuits, hooked_lm.interventions):
        for name in module.__all__:
            item = getattr(module, name)
            names = inspect.signature(item).parameters if inspect.isfunction(item) else {}
            is_of_logits = name != "thought_anchors"  # whose metric is of the text of an answer
            if "metric" in names and is_of_logits and not name.startswith("get_act_patch"):  # of TransformerLens
                found += 1
                assert "answers" in names, f"{module.__name__}.{name}"
    assert found > 15


def test_a_study_of_pairs(model: HookedTransformer, tmp_path: Path) -> None:
    rows = [
        {"clean": of.clean, "corrupted": of.corrupted, "answer": of.answer, "wrong_answer": of.wrong_answer}
        for of in TASK
    ]
    expected = study_pairs(model, rows, "sweep", tmp_path / "rows", options={"sites": "mlp_out"}).scores()
    assert isinstance(expected, Scores)
    assert_equal(
        study_pairs(model, PAIRS, "sweep", tmp_path / "pairs", options={"sites": "mlp_out"}).scores(), expected
    )
    answers = [model.to_single_token(answer) for answer in (*RIGHT, *WRONG)]
    ids = Pairs(model.to_tokens(CLEAN), model.to_tokens(CORRUPTED), torch.tensor([answers[:3]]), answers[3])
    of_all = study_pairs(model, ids, "sweep", tmp_path / "ids", options={"sites": "mlp_out"}).scores()
    metric = metrics.logit_difference([answers[:3]], answers[3])
    swept = patching.sweep(model, CORRUPTED, CLEAN, metric=metric, sites="mlp_out")
    assert torch.equal(of_all.values.flatten(), swept.values.flatten())


def test_functions_of_pairs_name_both_prompts_alike() -> None:
    """So that each takes them by keyword; all others with such a name are listed."""
    own = {name: function for name, (function, _) in {**FUNCTIONS, **OF_CIRCUITS}.items()}
    own |= {"train_alignment": train_alignment, "sweep_alignments": sweep_alignments, "Runner": circuits.Runner}
    own |= {
        name: getattr(circuits, name) for name in ("exchange", "neuron_circuit", "mean_constants", "optimal_constants")
    }
    for name, function in own.items():
        parameters = inspect.signature(function).parameters
        assert "Pairs" in str(parameters["corrupted"].annotation), name
        assert parameters["clean"].default is None, name
    for module in (patching, hooked_lm.analysis, circuits):
        for name in module.__all__:
            item = getattr(module, name)
            names = inspect.signature(item).parameters if inspect.isfunction(item) else {}
            assert "clean" not in names or name in own or name == "run_each", name


# ---- what is ambiguous -----------------------------------------------------------------------------------------------


def test_a_metric_that_is_given_is_used(model: HookedTransformer) -> None:
    metric = metrics.log_probability(RIGHT, model=model)
    expected = patching.sweep(model, CORRUPTED, CLEAN, metric=metric, **HEADS)
    assert_equal(patching.sweep(model, PAIRS, metric=metric, **HEADS), expected)
    right_alone = Pairs(CLEAN, CORRUPTED, RIGHT)
    assert_equal(patching.sweep(model, right_alone, metric=metric, **HEADS), expected)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (
            (PAIRS, CLEAN),
            {},
            TypeError,
            r"clean=\['When.* is given beside Pairs, which have the clean prompts: leave one out",
        ),
        ((PAIRS,), {"clean": CLEAN}, TypeError, "is given beside Pairs"),
        ((PAIRS,), {"corrupted": CORRUPTED}, TypeError, "multiple values for argument 'corrupted'"),
        ((CORRUPTED, PAIRS), {}, TypeError, "Pairs have both prompts: give them in place of corrupted and clean"),
        ((Pairs(CLEAN, CORRUPTED),), {}, TypeError, r"metric is missing: give metric=\.\.\., .* or Pairs with answers"),
        ((CORRUPTED, CLEAN), {}, TypeError, r"metric is missing: give metric=\.\.\., .* or Pairs with answers"),
        ((Pairs(CLEAN, CORRUPTED, RIGHT),), {}, ValueError, "give Pairs their wrong_answers, or give a metric="),
    ],
)
@pytest.mark.parametrize("function", [patching.sweep, attribute, patch_edges])
def test_what_is_ambiguous_is_refused(
    model: HookedTransformer, function: Any, arguments: Any, options: Any, error: type[Exception], says: str
) -> None:
    with unchecked(), pytest.raises(error, match=says):
        function(model, *arguments, **options)


def test_what_is_missing_is_named(model: HookedTransformer) -> None:
    with pytest.raises(TypeError, match="the clean prompts are missing: give clean="):
        circuits.discover(model, CORRUPTED, method="acdc", threshold=1.0)
    with pytest.raises(TypeError, match=r"receivers is missing: give a list such as \['L3H0<q>', 'm3'\], or 'logits'"):
        patching.path_patch(model, PAIRS)
    with pytest.raises(TypeError, match="answers are missing: give answers="):
        train_alignment(model, Pairs(CLEAN, CORRUPTED), site=("resid_pre", 1), size=2)
    with pytest.raises(TypeError, match="metric is missing"):
        circuits.null_circuits(model, Pairs(CLEAN, CORRUPTED), method="eap", n_edges=4)


# ---- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "places"),
    [(slice(1, None), [1, 2]), (slice(None, None, 2), [0, 2]), ([2, 0], [2, 0]), ([-1], [2]), (1, [1])],
)
def test_some_pairs(model: HookedTransformer, which: Any, places: list[int]) -> None:
    some = PAIRS[which]
    assert len(some) == len(places)
    for name, whole in (("clean", CLEAN), ("corrupted", CORRUPTED), ("answers", RIGHT), ("wrong_answers", WRONG)):
        assert getattr(some, name) == [whole[place] for place in places]
    ids = Pairs(model.to_tokens(CLEAN), model.to_tokens(CORRUPTED), torch.tensor([1, 2, 3]), 9)[which]
    assert isinstance(ids.clean, Tensor)
    assert isinstance(ids.answers, Tensor)
    assert torch.equal(ids.clean, model.to_tokens([CLEAN[place] for place in places]))
    assert ids.answers.tolist() == [place + 1 for place in places]
    assert ids.wrong_answers == 9
    assert [each.clean for each in PAIRS] == [[text] for text in CLEAN]


def test_one_pair(model: HookedTransformer) -> None:
    one = Pairs(CLEAN[0], CORRUPTED[0], RIGHT[0], WRONG[0])
    assert len(one) == len(one[:1]) == 1
    assert one[:1].clean == CLEAN[:1]
    ids = Pairs(torch.arange(3), torch.arange(3))
    assert len(ids) == len(ids[:]) == 1
    assert_equal(patching.sweep(model, one, **HEADS), patching.sweep(model, PAIRS[:1], **HEADS))
    assert len(Pairs(CLEAN, CORRUPTED, " Mary", [[" John", " Tom"]])[1:]) == 2


def test_selections_that_mean_nothing() -> None:
    for which in (3, [3], [0, -4]):
        with pytest.raises(IndexError):
            PAIRS[which]
    with pytest.raises(IndexError, match="contains none of the 3 indices"):
        PAIRS[3:]
    images = VisionInputs(torch.ones(2, 3).long(), {"pixel_values": torch.zeros(2, 3, 4, 4)})
    with pytest.raises(TypeError, match=r"divided by their model: model\.rows"):
        Pairs(images, images)[:1]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((CLEAN, CORRUPTED[:2]), ValueError, "as many clean as corrupted prompts, at least one; got 3 and 2"),
        (([], []), ValueError, "at least one; got 0 and 0"),
        ((CLEAN, CORRUPTED, RIGHT[:2]), ValueError, "answers are given for 2 pairs, and there are 3"),
        (
            (CLEAN, CORRUPTED, RIGHT, torch.arange(4)),
            ValueError,
            "wrong_answers are given for 4 pairs, and there are 3",
        ),
        ((CLEAN, CORRUPTED, None, WRONG), ValueError, "wrong_answers are given without answers"),
        ((7, CORRUPTED), TypeError, "clean must be texts, ids, conversations or VisionInputs, got 7"),
    ],
)
def test_pairs_that_do_not_go_together(arguments: Any, error: type[Exception], says: str) -> None:
    with unchecked(), pytest.raises(error, match=says):
        Pairs(*arguments)


def test_a_line_of_text() -> None:
    assert repr(Pairs("a", "b")) == "Pairs(1 pair: clean 'a', corrupted 'b')"
    ids = Pairs(torch.ones(2, 3).long(), torch.ones(2, 3).long(), [4, 5])
    assert repr(ids) == "Pairs(2 pairs, the first: clean tensor [2, 3], corrupted tensor [2, 3], answer 4)"
    assert len(repr(Pairs(["word " * 99] * 3, ["word " * 99] * 3, [" a"] * 3, [" b"] * 3))) < 250
    assert "<td" in PAIRS._repr_html_()


@pytest.mark.parametrize(
    "pairs", [PAIRS, Pairs(torch.arange(6).view(2, 3), torch.ones(2, 3).long(), " a", torch.tensor([1, 2]))]
)
def test_files(pairs: Pairs, tmp_path: Path) -> None:
    pairs.save(tmp_path / "pairs")
    again = hooked_lm.load(tmp_path / "pairs")
    assert type(again) is Pairs
    for name, value in vars(pairs).items():
        same = torch.equal if isinstance(value, Tensor) else lambda one, other: one == other
        assert same(getattr(again, name), value), name
    images = VisionInputs(torch.ones(1, 3).long(), {"pixel_values": torch.zeros(1, 3, 4, 4)})
    with pytest.raises(TypeError, match="pairs with images are not saved"):
        Pairs(images, images).save(tmp_path / "images")


# ---- there is one resolution -----------------------------------------------------------------------------------------

RESOLVING = {"rows_of", "tokens_of", "to_tokens", "aligned"}
HOME = "engine/pairs.py"
OTHERS = {
    "studies/pairs.py: _pair": "ids of rows of a data set, which it has read",
}


def resolutions(source: str) -> Iterator[str]:
    """The functions of a source that read both prompts of a pair, or compare their lengths."""
    if not {"clean", "corrupted"} <= {*re.findall("clean|corrupted", source)}:
        return
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            parts = [part for node in ast.walk(function) for part in _resolved(node)]
            if {"clean", "corrupted"} <= {word for part in parts for word in ("clean", "corrupted") if word in part}:
                yield function.name


def _resolved(node: ast.AST) -> list[str]:
    """What is read or compared at a node, as source; of a comprehension also what it goes through."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in RESOLVING:
        return [ast.unparse(each) for each in node.args]
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.DictComp)):
        inner = any(_resolved(each) for each in ast.walk(node) if isinstance(each, ast.Call))
        return [ast.unparse(each.iter) for each in node.generators] if inner else []
    if isinstance(node, ast.Compare) and ("len(" in ast.unparse(node) or ".shape" in ast.unparse(node)):
        return [ast.unparse(node)] if not isinstance(node.ops[0], (ast.In, ast.NotIn)) else []
    return []


def test_there_is_one_resolution_of_a_pair() -> None:
    found = {
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name in resolutions(file.read_text(encoding="utf-8"))
    }
    assert {f"{HOME}: pair_of", f"{HOME}: aligned"} <= found
    assert {name for name in found if not name.startswith(HOME)} == OTHERS.keys()


@pytest.mark.parametrize(
    "body",
    [
        "rows = rows_of(model, clean, 'clean'), rows_of(model, corrupted, 'corrupted')",
        "both = [model.to_tokens(each) for each in (clean, corrupted)]",
        "rows = {name: rows_of(model, getattr(task, name), name) for name in ('clean', 'corrupted')}",
        "if self.clean.shape != self.corrupted.shape:\n        raise ValueError",
        "aligned(corrupted, clean, model)",
    ],
)
def test_a_second_resolution_is_found(body: str) -> None:
    assert list(resolutions(f"def second(model, corrupted, clean):\n    {body}")) == ["second"]
    assert (
        list(resolutions("def of_one(model, clean):\n    rows = rows_of(model, clean, 'clean')\n    n = len(rows)"))
        == []
    )


def test_a_pair_is_of_one_length_unless_positions_are_said(model: HookedTransformer) -> None:
    with pytest.raises(
        ValueError, match=r"the same shape .*they have \(1, 4\) and \(1, 5\); from position 2 on the clean"
    ):
        pair_of(model, "When Tom left here", "When Mary left")
    corrupted, clean = pair_of(model, "When Tom left here", "When Mary left", same_length=False)
    assert (len(corrupted), len(clean)) == (1, 1)
    with pytest.raises(ValueError, match="each corrupted prompt needs a clean one; there are 2 and 1"):
        pair_of(model, ["When Tom left"] * 2, "When Mary", same_length=False)


def test_masks_and_other_indices_of_pairs() -> None:
    pairs = Pairs(["a", "b", "c"], ["d", "e", "f"])
    for mask in (True, [True, False, True], torch.tensor([True, False, True])):
        with unchecked(), pytest.raises(TypeError, match=r"pairs must be integers.*for a mask pass mask.nonzero"):
            pairs[mask]
    assert pairs[np.int64(1)].clean == pairs[torch.tensor(1)].clean == pairs[-2].clean == ["b"]
    with pytest.raises(IndexError, match="pairs 3 is out of range: there are 3"):
        pairs[3]


def test_images_with_one_row_of_ids_are_one_pair() -> None:
    given = VisionInputs(torch.tensor([1, 9, 9, 2]), {"pixel_values": torch.zeros(1, 3, 4, 8)})
    assert len(Pairs(given, given)) == 1
