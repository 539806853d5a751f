"""Studies of many pairs: equal to a loop of sweeps, the same bytes however they are computed, bad pairs refused by number."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import Attribution, attribute, metrics
from hooked_lm.cli import app
from hooked_lm.engine.study import SwapWarning
from hooked_lm.interventions import steering_vectors
from hooked_lm.interventions.steering_sweep import sweep_steering
from hooked_lm.patching import SweepResult
from hooked_lm.results import Scores
from hooked_lm.shards import with_threads
from hooked_lm.studies import PairTable, study_pairs
from tests.close import assert_apart, assert_close
from tests.core import thinned
from tests.rounding import undisturbed

NAMES = [("Mary", "John"), ("Alice", "Tom"), ("Sarah", "Peter"), ("Laura", "David"), ("Mary", "Tom")]
OPTIONS = {"layers": [0, 2], "sites": ["resid_pre", "mlp_out"]}


def pair(i: int) -> dict[str, str]:
    """The pairs 1 and 4 are longer than the others."""
    (a, b), start = NAMES[i], "Then, when" if i % 3 == 1 else "When"
    clean, corrupted = (f"{start} {a} and {b} went to the store, {who} gave a drink to" for who in (b, a))
    return {"clean": clean, "corrupted": corrupted, "answer": f" {a}", "wrong_answer": f" {b}"}


PAIRS = [pair(i) for i in range(5)]
SHORT = [PAIRS[i] for i in (0, 2, 3)]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def run(model: HookedTransformer, directory: Path, **changes: object) -> PairTable:
    given = {"pairs": PAIRS, "experiment": "sweep", "options": OPTIONS, "pairs_per_shard": 2, "threads": 1, **changes}
    return study_pairs(model, directory=directory, progress=False, **given)


def contents(table: PairTable) -> dict[str, bytes]:
    files = [*sorted(table.path.glob("shard-*")), table.path / "plan.json", table.path / "table.parquet"]
    return {path.name: path.read_bytes() for path in files}


def difference(model: HookedTransformer, pair: dict[str, str]) -> metrics.Metric:
    return metrics.logit_difference(pair["answer"], pair["wrong_answer"], model=model)


# ---- swapped prompts ---------------------------------------------------------------------------------------------------


def swapped(*numbers: int) -> list[dict[str, str]]:
    """The pairs, some with their prompts exchanged."""
    other = {"clean": "corrupted", "corrupted": "clean"}
    return [
        {other.get(name, name) if i in numbers else name: text for name, text in each.items()}
        for i, each in enumerate(PAIRS)
    ]


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((1,), r"in 1 of 5 pairs \(number 1, counted from 0\) .*: see whether these"),
        (range(5), "in all 5 pairs .*: exchange the columns 'clean' and 'corrupted'"),
    ],
)
def test_swapped_pairs_are_named_in_one_warning(
    model: HookedTransformer, tmp_path: Path, numbers: Sequence[int], says: str
) -> None:
    """Over all lengths, shards and metrics."""
    options, metric = {"layers": [0], "positions": None}, ["rank", "logit_difference", "probability"]
    with pytest.warns(SwapWarning, match=says) as warned:
        run(model, tmp_path, pairs=swapped(*numbers), options=options, metric=metric)
    assert len(warned) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_the_command_warns_of_swapped_pairs_once(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, swapped(2))))
    given = ["--pairs", str(path), "--output", str(tmp_path), "--positions", "together", "--layers", "0"]
    found = CliRunner().invoke(app, ["patch", "demo", *given, "--json"])
    said = json.loads(found.stdout)["warnings"]
    assert len(said) == 1
    assert "1 of 5 pairs (number 2, counted from 0)" in said[0]
    one = [f"--{side}={text}" for side, text in zip(("corrupted", "clean"), list(PAIRS[0].values())[:2], strict=True)]
    found = CliRunner().invoke(app, ["patch", "demo", *one, "--answers= Mary, John", "--layers=0", "--json"])
    said = json.loads(found.stdout)["warnings"]
    assert len(said) == 1
    assert said[0].endswith("Are the clean and the corrupted prompts swapped?")


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", thinned([1, 16], keep=[16]))
def test_a_table_equals_a_loop_of_sweeps(model: HookedTransformer, tmp_path: Path, batch_size: int) -> None:
    table = run(model, tmp_path, batch_size=batch_size)
    frame = table.to_dataframe()
    assert frame.columns.tolist() == ["pair", "site", "layer", "position", "from_end", "value", "corrupted", "clean"]
    assert frame["pair"].is_monotonic_increasing
    for number, each in enumerate(PAIRS):
        alone = patching.sweep(
            model, each["corrupted"], each["clean"], metric=difference(model, each), progress=False, **OPTIONS
        )
        rows = frame[frame["pair"] == number]
        expected = alone.to_dataframe()
        assert rows["site"].tolist() == expected["site"].tolist()
        assert rows["layer"].tolist() == expected["layer"].tolist()
        assert rows["position"].tolist() == [int(label.split()[0]) for label in expected["position"]]
        assert (rows["position"] - rows["from_end"] == model.to_tokens(each["clean"]).shape[1]).all()
        assert_close(torch.tensor(rows["value"].to_numpy()), alone.values.flatten())
        if batch_size == 1:
            assert rows["value"].tolist() == alone.values.flatten().tolist()
        assert_close(
            torch.tensor(rows[["corrupted", "clean"]].to_numpy()[0]), torch.cat([alone.corrupted, alone.clean])
        )


def test_means_over_pairs_with_named_axes(model: HookedTransformer, tmp_path: Path) -> None:
    found = run(model, tmp_path, pairs=SHORT).scores()
    texts = {side: [each[side] for each in SHORT] for side in SHORT[0]}
    metric = metrics.logit_difference(texts["answer"], texts["wrong_answer"], model=model)
    whole = patching.sweep(model, texts["corrupted"], texts["clean"], metric=metric, progress=False, **OPTIONS)
    assert isinstance(found, SweepResult)
    assert found.axes == {**whole.axes, "position": tuple(range(len(whole.axes["position"])))}
    assert_close(found.values, whole.values)
    assert_close(found.normalized().mean, whole.normalized().mean)
    assert_close(torch.stack(found.effects().interval()), torch.stack(whole.effects().interval()))


def test_pairs_that_are_alike_are_groups(model: HookedTransformer, tmp_path: Path) -> None:
    table = run(model, tmp_path, pairs=SHORT)
    labels = [f"item {place // 2}" for place in range(len(SHORT))]
    found = table.scores(groups=labels)
    assert found.groups == tuple(labels)
    assert_close(torch.stack(found.interval()), torch.stack(table.scores().grouped(labels).interval()))
    assert_apart(torch.stack(found.interval()), torch.stack(table.scores().interval()))
    assert table.plot(groups=labels).to_dict() == found.plot().to_dict()
    with pytest.raises(ValueError, match=f"groups has 1 labels, and there are {len(SHORT)} prompts"):
        table.scores(groups=["a"])


def test_pairs_of_different_lengths_are_aligned_by_name(model: HookedTransformer, tmp_path: Path) -> None:
    table = run(model, tmp_path)
    with pytest.raises(ValueError, match=r"do not have the same cells \(pair 1 and pair 0\)"):
        table.scores()
    frame = table.to_dataframe()
    for align, column in (("start", "position"), ("end", "from_end")):
        found = table.scores(align)
        n = len(found.axes["position"])
        assert n == frame.groupby("pair")["position"].nunique().min()
        assert found.axes["position"] == tuple(range(n) if align == "start" else range(-n, 0))
        for position in (found.axes["position"][0], found.axes["position"][-1]):
            rows = frame[(frame[column] == position) & (frame["layer"] == 2) & (frame["site"] == "mlp_out")]
            cell = found.select(site="mlp_out", layer=2).values[found.axes["position"].index(position)]
            assert cell.tolist() == rows["value"].tolist()
    with pytest.raises(ValueError, match="align must be"):
        table.scores("middle")


@pytest.mark.slow
def test_other_experiments_equal_their_functions(model: HookedTransformer, tmp_path: Path) -> None:
    one = SHORT[:1]
    texts, metric = {side: one[0][side] for side in one[0]}, difference(model, one[0])
    vectors = steering_vectors(model, [each["clean"] for each in SHORT], [each["corrupted"] for each in SHORT])
    by_head = {"sites": "z", "heads": "each", "positions": None}
    steering = {"vectors": vectors, "coefficients": [-1, 0.5], "layers": [1, 2]}
    expected = {
        "attribute": (
            by_head,
            attribute(model, texts["corrupted"], texts["clean"], metric=metric, check=False, **by_head),
        ),
        "ablate": ({"components": "mlps"}, patching.ablate(model, texts["clean"], "mlps", metric=metric)),
        "steer": (
            steering,
            sweep_steering(model, vectors, texts["corrupted"], metric, coefficients=[-1, 0.5], layers=[1, 2]),
        ),
    }
    clean, corrupted = (metric(model(texts[side])) for side in ("clean", "corrupted"))
    for name, (options, alone) in expected.items():
        found = run(model, tmp_path, pairs=one, experiment=name, options=options).scores()
        assert found.axes == alone.axes
        assert_close(found.values, alone.values)
        assert_close(found.effects().values, alone.effects().values)
        assert_close(torch.cat([found.clean, found.corrupted]), torch.cat([clean, corrupted]))


@pytest.mark.slow
def test_attribution_keeps_its_exact_values(model: HookedTransformer, tmp_path: Path) -> None:
    options = {"sites": "z", "heads": "each", "positions": None, "method": "ig-activations", "steps": 2}
    texts = {side: [each[side] for each in SHORT] for side in SHORT[0]}
    metric = metrics.logit_difference(texts["answer"], texts["wrong_answer"], model=model)
    alone = attribute(model, texts["corrupted"], texts["clean"], metric=metric, check=True, progress=False, **options)
    found = run(model, tmp_path, pairs=SHORT, experiment="attribute", options={**options, "check": True}).scores()
    assert isinstance(found, Attribution)
    assert found.method == "ig-activations"
    assert_close(found.exact, alone.exact)
    assert_close(torch.tensor(found.agreement["spearman"].item()), torch.tensor(alone.agreement["spearman"].item()))
    unchecked = run(model, tmp_path, pairs=SHORT, experiment="attribute", options=options).scores()
    assert isinstance(unchecked, Attribution)
    assert unchecked.exact is None
    assert_close(unchecked.values, found.values)


def agreement(
    model: HookedTransformer, corrupted: Tensor, clean: Tensor, *, metric: object, layers: Sequence[int]
) -> Scores:
    """An experiment of a user: how similar the streams of both prompts are."""
    runs = [model.run_with_cache(ids)[1] for ids in (corrupted, clean)]
    values = [torch.cosine_similarity(*(run["resid_post", layer][:, -1] for run in runs), dim=-1) for layer in layers]
    return Scores(torch.stack(values), {"layer": layers})


def one_number(model: HookedTransformer, corrupted: Tensor, clean: Tensor, *, metric: object) -> Scores:
    return Scores(torch.zeros(1), {})


@pytest.mark.slow
def test_functions_and_several_metrics(model: HookedTransformer, tmp_path: Path) -> None:
    found = run(model, tmp_path, experiment=agreement, options={"layers": [0, 3]})
    assert found.to_dataframe().columns.tolist() == ["pair", "layer", "value"]
    assert type(found.scores()) is Scores
    assert found.scores().values.shape == (2, 5)
    other = run(model, tmp_path, experiment=partial(agreement, layers=[0, 1]), options=None)
    assert other.path != found.path
    with pytest.raises(ValueError, match=r"a number for each of the pairs 0 to 0|a number for each of the pairs"):
        run(model, tmp_path, pairs=SHORT, experiment=one_number, options=None)
    both = run(model, tmp_path, pairs=SHORT, metric=["logit_difference", "probability"], options={"positions": None})
    means = both.scores().select(metric="probability", layer=0)
    answers = [each["answer"] for each in SHORT]
    assert_close(means.clean, metrics.probability(answers, model=model)(model([each["clean"] for each in SHORT])))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_bytes_from_parts_and_after_an_interruption(model: HookedTransformer, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    expected = contents(whole)
    assert (len(expected), len(whole), whole.n_pairs) == (8, len(whole.to_dataframe()), 5)
    first = run(model, tmp_path / "parts", shard=(1, 2))
    assert (first.shards, first.missing, first.n_pairs) == ([1], [0, 2], 2)
    assert not (first.path / "table.parquet").exists()
    for call in (first.scores, first.gather):
        with pytest.raises(ValueError, match=r"2 shards of .* are missing"):
            call()
    assert first.to_dataframe()["pair"].unique().tolist() == [2, 3]
    parts = run(model, tmp_path / "parts", shard=(0, 2))
    assert contents(parts) == expected
    times = {shard: parts.file_of(shard).stat().st_mtime_ns for shard in parts.shards}
    for name in ("shard-000001.json", "table.parquet", "index.json"):
        (parts.path / name).unlink()
    again = run(model, tmp_path / "parts")
    assert contents(again) == expected
    assert [shard for shard in times if again.file_of(shard).stat().st_mtime_ns != times[shard]] == [1]
    again.verify()
    assert pd.read_parquet(again.path / "table.parquet").equals(whole.to_dataframe())
    assert whole.to_datasets()["value"][:] == whole.to_dataframe()["value"].tolist()


@pytest.mark.slow
def test_what_determines_the_numbers_is_another_study(model: HookedTransformer, tmp_path: Path) -> None:
    changed = [
        {},
        {"pairs": SHORT},
        {"options": {}},
        {"metric": "logit"},
        {"batch_size": 1},
        {"experiment": "attribute"},
    ]
    assert len({run(model, tmp_path, **changes).path for changes in changed}) == len(changed)


def test_the_same_pairs_from_other_sources_are_the_same_study(model: HookedTransformer, tmp_path: Path) -> None:
    expected = run(model, tmp_path / "out", pairs=SHORT).path
    ids = [{**each, "clean": model.to_tokens(each["clean"])[0].tolist(), "answer": [each["answer"]]} for each in SHORT]
    frame = pd.DataFrame(PAIRS).rename(columns={"clean": "prompt"}).assign(note="unused").iloc[[0, 2, 3, 1]]
    frame.to_parquet(tmp_path / "pairs.parquet")
    renamed = {"columns": {"clean": "prompt"}, "max_pairs": 3}
    assert run(model, tmp_path / "out", pairs=ids).path == expected
    assert run(model, tmp_path / "out", pairs=frame, **renamed).path == expected
    assert run(model, tmp_path / "out", pairs=tmp_path / "pairs.parquet", **renamed).path == expected


def test_damage_is_found(model: HookedTransformer, tmp_path: Path) -> None:
    table = run(model, tmp_path)
    whole = (table.path / "table.parquet").read_bytes()
    (table.path / "table.parquet").write_bytes(whole[:-20] + whole[-19:] + b"1")
    with pytest.raises(ValueError, match=r"table.parquet is not what the shards hold"):
        table.verify()
    path = table.file_of(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"1 of 3 shards .* shard-000001.parquet has \d+ bytes, not"):
        table.verify()
    with pytest.raises(ValueError, match=r"shard-000001.parquet is damaged"):
        table.to_dataframe()
    with pytest.raises(FileNotFoundError, match="not the folder of a study"):
        PairTable(tmp_path)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_pairs_are_named_before_anything_runs(model: HookedTransformer, tmp_path: Path) -> None:
    wrong = [
        {**PAIRS[0], "corrupted": PAIRS[1]["corrupted"]},
        {**PAIRS[0], "answer": "Mary"},
        {**PAIRS[0], "clean": None},
        {**PAIRS[0], "answer": 10**6},
        {**PAIRS[0], "clean": [1, 2.5]},
        {**PAIRS[0], "clean": "word " * 1000},
        {**PAIRS[0], "answer": -7},
    ]
    with pytest.raises(ValueError, match="7 of 12 pairs cannot run") as raised:
        run(model, tmp_path, pairs=[*PAIRS, *wrong])
    lines = str(raised.value).splitlines()[1:]
    expected = [
        "pair 5: clean and corrupted prompts must have the same shape",
        "pair 6: answer: 'Mary' has no leading space", "pair 7: it has no 'clean'", "pair 8: ",
        "pair 9: clean must be whole numbers", "pair 10: clean has 2",
        "pair 11: answer: -7 is not a token id",
    ]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": []}, "there are no pairs"),
        ({"pairs": 3}, "pairs must be a list of dicts"),
        ({"pairs": ["Mary"]}, "a pair must be a dict with 'clean'"),
        ({"pairs": [{"prompt": "a"}]}, r"no column 'clean' and .* 'wrong_answer', only 'prompt'; columns="),
        ({"columns": {"right": "answer"}}, "columns names 'clean'"),
        (
            {"pairs": [{k: v for k, v in PAIRS[0].items() if k != "wrong_answer"}]},
            "needs 'wrong_answer', which pair 0 lacks",
        ),
        ({"metric": "accuracy"}, "metric must be of 'logit_difference'"),
        ({"metric": ["logit", "logit"]}, "different names"),
        ({"experiment": "probe"}, "experiment must be one of 'sweep'"),
        ({"options": {"site": "z"}}, "the experiment 'sweep' takes sites, by, layers, .*; got 'site'"),
        ({"options": {"resume_file": "a"}}, r"got 'resume_file' \(the study gives it itself\)"),
        ({"experiment": "steer", "options": {}}, "the experiment 'steer' needs 'vectors' and 'coefficients'"),
        ({"options": {"replace_with": "mean"}}, "mean of the pairs that run together"),
        ({"experiment": "ablate", "options": {"replace_with": "resample"}}, "needs source_prompts"),
        ({"experiment": lambda: None, "n_workers": 2, "options": {}}, "define functions at the top of a module"),
        ({"options": {"sites": "resid_pri"}}, "resid_pre"),
        ({"options": {"positions": [99]}}, "99"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"n_workers": 0}, "n_workers must be at least 1"),
        ({"shard": "2/2"}, "shard must be"),
        ({"max_pairs": 0}, "max_pairs must be at least 1"),
        ({"pairs": "/nowhere/pairs.jsonl"}, "no file of .jsonl"),
    ],
)
def test_bad_input(model: HookedTransformer, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, OSError), match=message):
        run(model, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["patch", "demo", *map(str, arguments)], env={"COLUMNS": "200"})
    return found.stdout if found.exit_code == 0 else f"exit {found.exit_code}: {found.stderr}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PAIRS))
    return path


@pytest.mark.slow
def test_the_command_resumes_and_shows_the_largest_effects(file: Path) -> None:
    with with_threads(1):  # as the command loads it: the last bits of folded weights depend on the number of threads
        model = HookedTransformer.from_pretrained("demo")
    expected = contents(run(model, file.parent / "python", options={**OPTIONS, "positions": "each"}))
    options = ["--pairs", file, "--output", file.parent / "out", "--site=resid_pre", "--site=mlp_out", "--layers=0,2"]
    options += ["--positions=each", "--pairs-per-shard=2", "--threads=1"]
    assert "2 shards missing" in call(*options, "--shard=1/2")
    shown = call(*options)
    assert "sweep of 5 pairs in 3 shards (complete)" in shown
    assert len([line for line in shown.splitlines() if "│" in line]) == 10
    [folder] = (file.parent / "out").iterdir()
    found = contents(PairTable(folder))
    assert found == expected


def test_the_command_steers(model: HookedTransformer, file: Path) -> None:
    texts = ([each[side] for each in PAIRS] for side in ("clean", "corrupted"))
    steering_vectors(model, *texts, layers=[1]).save(file.parent / "vectors.safetensors")
    options = [f"--option=vectors={file.parent / 'vectors.safetensors'}", "--option=coefficients=[0, 2]"]
    shown = call("--pairs", file, "--output", file.parent / "out", "--experiment=steer", *options)
    assert "steer of 5 pairs in 1 shard (complete), 10 rows" in shown


def test_bad_options_of_the_command(file: Path) -> None:
    given = ["--pairs", file, "--output", file.parent / "out"]
    for option, message in (
        ("--column=clean=prompt", "the pairs have no column 'prompt'"),
        ("--column=answer=right", "give --column answer=NAME"),
        ("--option=components", "option must be name=value"),
        ("--heads=some", "heads must be"),
    ):
        shown = call(*given, option)
        assert shown.startswith("exit 2:")
        assert message in shown
    assert not (file.parent / "out").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("harvest workers")
def test_two_workers_write_the_same_bytes(model: HookedTransformer, tmp_path: Path) -> None:
    with undisturbed():  # other processes do not round as `--rounding` does
        assert contents(run(model, tmp_path / "two", n_workers=2)) == contents(run(model, tmp_path / "one"))
