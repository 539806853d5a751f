"""A circuit of a model that does not do the task is a share of nothing: it warns; one that does it, does not."""

import warnings
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis import (
    attribute,
    attribute_edges,
    attribute_nodes,
    direct_logit_attribution,
    metrics,
    source_attribution,
)
from hooked_lm.analysis.circuits import discover, evaluate
from hooked_lm.analysis.metrics import Metric
from hooked_lm.demo.corpus import TASKS, Example
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.reports import circuit as report

N_PAIRS = 16  # half of them for the search, half to judge it
ALL, HALVES = slice(None), (slice(0, None, 2), slice(1, None, 2))
PACKAGE = Path(hooked_lm.__file__).parent
Task = tuple[Tensor, Tensor, Metric]  # corrupted and clean prompts, the difference of their answers' logits


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def task(
    model: HookedTransformer, clean: list[str], corrupted: list[str], answers: list[str], wrong: list[str]
) -> Task:
    ids = [[model.to_single_token(word) for word in words] for words in (answers, wrong)]
    return model.to_tokens(corrupted), model.to_tokens(clean), metrics.logit_difference(*ids)


def names(model: HookedTransformer, rows: slice = ALL) -> Task:
    pairs = prompt_pairs(N_PAIRS)[rows]
    columns = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted", "answer", "wrong_answer"))
    return task(model, *columns)


def drawn(model: HookedTransformer, name: str, rows: slice = ALL) -> Task:
    """Pairs of examples of a task, of one length and with other answers."""
    rng, waiting = Random(0), defaultdict[int, list[Example]](list)
    found = defaultdict[int, list[tuple[Example, Example]]](list)
    pairs: list[tuple[Example, Example]] = []
    while len(pairs) < N_PAIRS:
        example = TASKS[name](rng)
        if len(model.to_tokens(example.answer, prepend_bos=False)[0]) > 1:
            continue
        length = len(model.to_tokens(example.prompt)[0])
        others, pairs = waiting[length], found[length]
        if others and others[-1].answer != example.answer:
            pairs.append((example, others.pop()))
        else:
            others.append(example)
    clean, corrupted = zip(*pairs[rows], strict=True)
    return task(
        model,
        [one.prompt for one in clean],
        [one.prompt for one in corrupted],
        [one.answer for one in clean],
        [one.answer for one in corrupted],
    )


def warned(model: HookedTransformer, of: Task, method: str) -> int:
    """How many of the two functions warn, of the caller's line."""
    corrupted, clean, metric = of
    options = {"threshold": 0.02} if method == "acdc" else {"n_edges": 75}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        circuit = discover(model, corrupted, clean, metric=metric, method=method, progress=False, **options)
        evaluation = evaluate(model, circuit, corrupted, clean, metric=metric, n_random=0, progress=False)
    assert " to " in repr(evaluation).split("faithfulness")[1].split(" with ")[0], "it has no interval"
    files = [Path(warning.filename) for warning in found if "hardly differ" in str(warning.message)]
    assert not any(PACKAGE in file.parents for file in files), "a warning points into the package"
    return len(files)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_untrained_models_do_no_task(model: HookedTransformer, seed: int) -> None:
    """The search and its judgement have eight prompts each: by chance one of both is beyond two standard errors, as of seed 5."""
    assert warned(model.untrained(seed), names(model), "eap") >= 1


@pytest.mark.parametrize("method", ["eap", "pruning", "acdc"])
def test_every_search_warns(model: HookedTransformer, method: str) -> None:
    assert warned(model.untrained(0), names(model), method) == 2


def test_effects_that_were_measured_before_warn_too(model: HookedTransformer) -> None:
    twin, (corrupted, clean, metric) = model.untrained(0), names(model)
    effects = attribute_edges(twin, corrupted, clean, metric=metric, method="eap", check=False, progress=False)
    with pytest.warns(UserWarning, match="hardly differ"):
        discover(twin, corrupted, clean, metric=metric, method=effects, n_edges=75)


@pytest.mark.parametrize("name", ["capitals", "days", "months", "pronouns", "agreement"])
def test_trained_tasks_do_not_warn(model: HookedTransformer, name: str) -> None:
    assert warned(model, drawn(model, name), "eap") == 0


# ---- what is split into parts ----------------------------------------------------------------------------------------


def warnings_of(model: HookedTransformer, way: str) -> int:
    """How often a function warns that what it splits may be 0."""
    pairs = prompt_pairs(N_PAIRS)
    clean, corrupted, *answers = (
        [getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted", "answer", "wrong_answer")
    )
    corrupted_ids, clean_ids, metric = names(model)
    both = {"one": metric, "other": metric}
    ways = {
        "edges": lambda: attribute_edges(model, corrupted_ids, clean_ids, metric=metric, check=False),
        "nodes": lambda: attribute(
            model, corrupted_ids, clean_ids, metric=metric, sites="z", heads="each", check=False
        ),
        "several sites": lambda: attribute_nodes(model, corrupted_ids, clean_ids, metric=both, check=False),
        "noise": lambda: attribute(model, corrupted_ids, clean_ids, metric=metric, direction="noise", check=9),
        "direct": lambda: direct_logit_attribution(model, clean, *answers),
        "sources": lambda: source_attribution(model, clean, *answers, layers=[1]),
        "report": lambda: report.find(
            model, report.Task(clean, corrupted, *answers), method="eap", n_edges=30, check=9
        ),
    }
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ways[way]()
    ours = [warning for warning in found if "hardly differ" in str(warning.message)]
    assert all(PACKAGE not in Path(warning.filename).parents for warning in ours), "a warning points into the package"
    return len(ours)


def warned_of_nodes(model: HookedTransformer, halves: list[Task]) -> int:
    """For how many halves of the pairs `attribute` warns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for corrupted, clean, metric in halves:
            attribute(model, corrupted, clean, metric=metric, check=False, progress=False)
    return len([warning for warning in found if "hardly differ" in str(warning.message)])


@pytest.mark.slow
def test_nodes_of_untrained_models_are_warned_of(model: HookedTransformer) -> None:
    """Of eight prompts, one half in a few is beyond two standard errors by chance."""
    halves = [names(model, rows) for rows in HALVES]
    found = [warned_of_nodes(model.untrained(seed), halves) for seed in range(8)]
    assert min(found) >= 1, found


@pytest.mark.parametrize("name", ["capitals", "days", "months", "pronouns", "agreement"])
def test_nodes_of_trained_tasks_are_not_warned_of(model: HookedTransformer, name: str) -> None:
    assert warned_of_nodes(model, [drawn(model, name, rows) for rows in (ALL, *HALVES)]) == 0


def test_two_equal_runs_are_warned_of(model: HookedTransformer) -> None:
    """An exact 0, also of one prompt."""
    _, clean, metric = names(model, slice(1))
    with pytest.warns(UserWarning, match="the clean and the corrupted prompts hardly differ, by 0 ± 0"):
        attribute(model, clean, clean, metric=metric, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["edges", "nodes", "several sites", "noise", "direct", "sources", "report"])
def test_parts_of_nothing_are_warned_of_once(model: HookedTransformer, way: str) -> None:
    assert warnings_of(model.untrained(0), way) == 1
    assert warnings_of(model, way) == 0


def test_one_prompt_has_no_standard_error(model: HookedTransformer) -> None:
    twin = model.untrained(0)
    direct_logit_attribution(twin, "The capital of France is", " Paris", " Rome")  # warnings are errors here
    direct_logit_attribution(twin, ["The capital of France is", "The capital of Italy is"], [" Paris", " Rome"])
