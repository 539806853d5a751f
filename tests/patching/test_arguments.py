"""Mistakes in arguments are named before anything runs, in the words of the argument; annotations are not checked here, as in a
user's session."""

import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import patching
from hooked_lm.analysis import Attribution, attribute, attribute_edges, patch_edges
from hooked_lm.patching import Edit
from tests.close import assert_close
from tests.engine.naive import naive
from tests.families import CASES, ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy

MODEL, CORRUPTED, CLEAN = toy(n_layers=2), ids(2, 4), ids(2, 4, seed=1)


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a letter as layer": ({"layers": ["a"]}, TypeError, r"layer must be integers, got \['a'\]"),
    "a half layer": ({"layers": [0.5]}, TypeError, "layer must be integers"),
    "a truth as layer": ({"layers": [True]}, TypeError, "layer must be integers"),
    "nothing as position": ({"positions": [None]}, TypeError, "position must be integers"),
    "a number as sites": ({"sites": 3}, TypeError, "sites must be short names such as 'resid_pre', got 3"),
    "a number among sites": ({"sites": ["z", 3]}, TypeError, "sites must be short names such as 'resid_pre', got 3"),
    "a word as metric": ({"metric": "loss"}, TypeError, "metric must be a function of the logits.* got 'loss'"),
    "a word as metric, mended": ({"metric": "loss"}, TypeError, r"metric=metrics.loss\(...\) of hooked_lm.analysis, or answers="),
    "one answer": ({"metric": None, "answers": 3}, TypeError, "answers must be a tuple of the right and the wrong .* got 3"),
    "a list of answers": ({"metric": None, "answers": [3, 4]}, TypeError, "answers must be a tuple"),
    "a tuple of one": ({"metric": None, "answers": (3,)}, TypeError, "answers must be a tuple"),
    "a metric and answers": ({"answers": (3, 4)}, TypeError, "metric and answers are both given"),
    "neither": ({"metric": None}, TypeError, r'or the right and the wrong next token, as answers=\(" Mary", " John"\)'),
    "a list of metrics": ({"metric": [metric]}, TypeError, "metric must be a function of the logits"),
    "no metric": ({"metric": {}}, ValueError, "metric is empty"),
    "a word among metrics": ({"metric": {"it": "loss"}}, TypeError, "got 'loss' as 'it'"),
    "a number to replace with": ({"replace_with": 0}, TypeError, "replace_with must be .* got a int"),
    "a number as prompts": ({"clean": 5}, TypeError, "clean must be a text, a list of texts, a tensor of ids, .* got 5"),
    "a list of ids": ({"clean": [[1, 2]]}, TypeError, r"clean must be .* got \[1, 2\]"),
    "no prompts": ({"clean": []}, ValueError, "clean is empty"),
    "halves as ids": ({"clean": CLEAN + 0.5}, TypeError, "clean must be whole numbers, got float32"),
}  # fmt: skip


def _raised(run: Any, arguments: dict[str, Any]) -> list[str]:
    try:
        run(MODEL, CORRUPTED, **{"clean": CLEAN, "metric": metric, "progress": False, **arguments})
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def report() -> None:
    """Print what each mistake raises."""
    said = {
        name: [_raised(run, arguments) for run in (patching.sweep, attribute)]
        for name, (arguments, _, _) in WRONG.items()
    }
    print(json.dumps(said))


@pytest.fixture(scope="module")
def said() -> dict[str, list[list[str]]]:
    """What mistakes raise in a session of a user, in which nothing checks annotations."""
    command = [sys.executable, "-c", "from tests.patching.test_arguments import report; report()"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.xdist_group("mistakes in arguments")  # one process says them all
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(said: dict[str, list[list[str]]], name: str) -> None:
    _, error, message = WRONG[name]
    for kind, text in said[name]:
        assert kind == error.__name__
        assert re.search(message, text)


def test_whole_numbers_have_no_mean() -> None:
    mixture = toy(n_layers=2, num_experts=4, experts_per_token=2)
    with pytest.raises(ValueError, match="holds whole numbers"):
        patching.sweep(
            mixture, CORRUPTED, CLEAN, metric=metric, sites="expert_indices", replace_with="mean", progress=False
        )


def test_sparse_values_are_their_numbers() -> None:
    value = torch.zeros(4, 32)
    value[2, 5], value[1, 3] = 7.0, -3.0
    sparse = value.to_sparse()
    study = {"metric": metric, "positions": [1, 2], "progress": False}
    expected = patching.sweep(MODEL, CORRUPTED, CLEAN, replace_with=value, **study)
    assert torch.equal(patching.sweep(MODEL, CORRUPTED, CLEAN, replace_with=sparse, **study).values, expected.values)
    edit = Edit("blocks.1.hook_resid_pre", sparse, (2,))
    [(_, found)] = patching.Experiment(MODEL, CORRUPTED, [metric]).run([[edit]], progress=False)
    dense = Edit("blocks.1.hook_resid_pre", value.expand(1, 4, 32), (2,))
    assert_close(found[0], metric(naive(MODEL, CORRUPTED, [dense])))


@pytest.mark.slow
def test_heads_are_chosen_by_their_labels() -> None:
    three, study = toy(n_layers=3), {"metric": metric, "sites": ["z", "q"], "progress": False}
    labels = ["L2H1", "L0H3", "L2H0"]
    for positions in (None, [1, -1]):
        for run in (patching.sweep, lambda *args, **options: attribute(*args, check=True, **options)):
            whole = run(three, CORRUPTED, CLEAN, positions=positions, heads="each", **study)
            found = run(three, CORRUPTED, CLEAN, positions=positions, heads=labels, **study)
            assert list(found.axes) == ["site", *(["position"] if positions else []), "head"]
            assert found.axes["head"] == tuple(labels)
            for label in labels:
                assert_close(found.select(head=label).values, whole.select(head=label).values)
                if isinstance(found, Attribution) and isinstance(whole, Attribution):
                    assert found.exact is not None
                    assert_close(found.select(head=label).exact, whole.select(head=label).exact)
    by_label = patching.ablate(three, CORRUPTED, heads="L1H2", metric=metric, progress=False)
    assert_close(by_label.values[0], patching.ablate(three, CORRUPTED, metric=metric, progress=False).values[1, 2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": ["L1H2", 3]}, ValueError, "labels such as 'L1H7', or indices; got 3 among labels"),
        ({"heads": ["L1H2", "L1H2"]}, ValueError, "a head is given twice"),
        ({"heads": "L1H2", "layers": [1]}, ValueError, r"leave out layers=\[1\]"),
        ({"heads": "L5H2"}, IndexError, "layer 5 is out of range"),
        ({"heads": "L1H9"}, IndexError, "head 9 is out of range"),
        ({"heads": "1.7"}, ValueError, "'1.7' is not the label of a head; labels are like 'L1H7'"),
    ],
)
def test_labels_that_name_no_head(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, sites="z", **options)


PRESETS: dict[str, dict[str, Any]] = {
    "layer": {"sites": ["attn_out", "mlp_out"], "positions": None},
    "position": {"sites": "resid_pre"},
    "head": {"sites": "z", "positions": None, "heads": "each"},
    "neuron": {"sites": "post", "positions": None, "neurons": "each"},
}


@pytest.mark.parametrize("by", PRESETS)
def test_a_grid_by_name(by: str) -> None:
    for run in (patching.sweep, attribute):
        common: dict[str, Any] = {"metric": metric, "progress": False}
        named, expected = (run(MODEL, CORRUPTED, CLEAN, **common, **one) for one in ({"by": by}, PRESETS[by]))
        assert named.axes == expected.axes
        assert torch.equal(named.values, expected.values)
    some = patching.sweep(
        MODEL, CORRUPTED, CLEAN, **common, by="head", sites="q", positions=[-1], layers=[1], heads=[0]
    )
    assert [len(labels) for labels in some.axes.values()] == [1, 1, 1]
    with pytest.raises(ValueError, match="by must be 'layer', 'position', 'head', 'neuron' or None, got 'heads'"):
        patching.sweep(MODEL, CORRUPTED, CLEAN, **common, by="heads")


def test_a_grid_by_name_of_sites_in_one_of_two_stacks() -> None:
    model = hooked(next(case for case in ENCODER_DECODER_CASES if case.family == "t5"))
    prompts = torch.randint(3, model.cfg.d_vocab, (2, 1, 5), generator=torch.Generator().manual_seed(0))
    common: dict[str, Any] = {"metric": lambda logits: logits[:, -1, 3], "sites": "decoder.z", "progress": False}
    found = patching.sweep(model, *prompts, by="head", **common)
    assert torch.equal(found.values, patching.sweep(model, *prompts, positions=None, heads="each", **common).values)


def test_a_grid_by_layer_has_the_sublayers_that_there_are() -> None:
    mixers = hooked(next(case for case in CASES if case.family == "mamba"))
    prompts = torch.randint(mixers.cfg.d_vocab, (2, 1, 6), generator=torch.Generator().manual_seed(0))
    found = patching.sweep(mixers, *prompts, metric=lambda logits: logits[:, -1, 3], by="layer", progress=False)
    explicit = patching.sweep(
        mixers, *prompts, metric=lambda logits: logits[:, -1, 3], sites="mixer_out", positions=None, progress=False
    )
    assert torch.equal(found.values, explicit.values)


def test_a_run_is_not_replaced_by_itself() -> None:
    """What replaces values is the other run, by its name; its own values would change nothing."""
    study: dict[str, Any] = {"metric": metric, "sites": "z", "progress": False}
    for direction, own, other in (("denoise", "corrupted", "clean"), ("noise", "clean", "corrupted")):
        by_default = patching.sweep(MODEL, CORRUPTED, CLEAN, direction=direction, **study)
        by_name = patching.sweep(MODEL, CORRUPTED, CLEAN, direction=direction, replace_with=other, **study)
        assert torch.equal(by_default.values, by_name.values)
        for function in (patching.sweep, attribute, attribute_edges, patch_edges):
            options = {**study, "direction": direction, "replace_with": own}
            options = {name: options[name] for name in options if name in signature(function).parameters}
            with pytest.raises(ValueError, match=f"direction='{direction}' changes the {own} run.*give '{other}'"):
                function(MODEL, CORRUPTED, CLEAN, **options)
