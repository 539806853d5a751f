"""`hooked-lm demo` and the experiment that it runs."""

import base64
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.cli import app
from hooked_lm.demo import corpus, experiment
from hooked_lm.hooks.head_labels import head_label, parse_head_label
from tests.close import assert_close, assert_near

FIGURES = re.compile(r'<script type="application/json" id="(figure-[^"]+)-data">(.*?)</script>', re.DOTALL)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def result(model: HookedTransformer) -> experiment.Result:
    return experiment.run(model, experiment.prompt_pairs(4))


def test_demo_writes_the_report(tmp_path: Path):
    path = tmp_path / "report.html"
    shown = call("demo", "--output", path, "--n-pairs", 2)
    assert shown.exit_code == 0, shown.output
    assert f"report: {path}" in shown.output
    rows = re.findall(r"(?m)^L\dH\d\s+│((?:\s+[+-]\d+\.\d{3} │){3})(.*)", shown.output)
    assert len(rows) == 10
    for row, acts in rows:
        restored, low, high = map(float, re.findall(r"[+-]\d+\.\d{3}", row))
        assert low <= restored <= high
        assert re.fullmatch(r" ·\w+ \(\d+\) +│ ·\w+ \(\d+\) +│ +0\.\d\d *", acts)
    assert re.search(r"patched\s+692 cells in \d+\.\d\d s: \d+\.\d GFLOP", shown.output)
    page = path.read_text(encoding="utf-8")
    assert page.count('<div id="figure-') == 7
    assert "Which heads carry it" in page
    assert "Intervals are those of all cells of a figure at once" in page


def test_the_table_is_shown_before_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: experiment.Result
):
    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(experiment, "run", lambda model, pairs: result)
    monkeypatch.setattr(experiment, "write_report", refuse)
    shown = call("demo", "--output", tmp_path / "report.html")
    assert shown.exit_code == 2
    assert 0 < shown.output.index("restored") < shown.output.index("the disk is full")


def test_positions_of_heads_are_numbers_in_the_json(
    tmp_path: Path, result: experiment.Result, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(experiment, "run", lambda model, pairs: result)
    shown = call("demo", "--json", "--output", tmp_path / "report.html")
    heads = json.loads(shown.stdout)["heads"]
    first = heads["largest"][0]
    assert (heads["shown"], heads["of"]) == (10, 32)
    assert_close(torch.tensor(heads["values"]["restored"]), result.heads.mean)
    acting = result.acting(head_label(*result.top_heads(1)[0]))
    assert (first["position"], first["looks_at"]) == (acting.position, acting.looks_at)
    assert (first["token"], first["looks_at_token"]) == tuple(
        result.tokens[at] for at in (acting.position, acting.looks_at)
    )


@pytest.mark.slow
def test_one_pair_has_no_intervals(tmp_path: Path):
    path = tmp_path / "report.html"
    shown = call("demo", "--output", path, "--n-pairs", 1)
    assert shown.exit_code == 0, shown.output
    assert len(re.findall(r"(?m)^L\dH\d\s+│\s+[+-]\d\.\d{3} │", shown.output)) == 10
    assert "95%" not in shown.output
    body = path.read_text(encoding="utf-8").split("</head>")[1]
    assert "one pair says nothing about others" in body
    traces = [trace for _, data in FIGURES.findall(body) for trace in json.loads(data)["data"]]
    assert len(traces) == 6 + experiment.SHOWN_HEADS
    assert not [trace for trace in traces if {"error_y", "customdata"} & trace.keys()]
    assert not re.search(r"\bnan\b|[+-]nan", shown.output + re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL))


def test_the_experiment_finds_something_true(result: experiment.Result):
    """What must hold of any model that solves the task: the giver decides, and the last token has to be told."""
    clean, corrupted = result.differences.mean
    assert clean > 1
    assert corrupted < -1
    [giver] = result.changed
    assert result.tokens[giver] == result.pairs[0].wrong_answer
    assert result.corrupted_tokens[giver] == result.pairs[0].answer
    n_pos, n_layers, n_heads = len(result.tokens), result.model.cfg.n_layers, result.model.cfg.n_heads
    effects = result.sites.mean
    assert effects.shape == (3, n_layers, n_pos)
    # before the first layer everything stands at the one token that differs
    only_there = torch.zeros(n_pos)
    only_there[giver] = 1
    assert_close(result.sites.select(site="resid_pre", layer=0).mean, only_there)
    # and what precedes it cannot be told apart in any layer
    assert_close(effects[:, :, :giver], torch.zeros(3, n_layers, giver))
    assert_close(result.patterns.sum(-1), torch.ones(n_layers, n_heads, n_pos))
    assert result.heads.mean.shape == (n_layers, n_heads)
    assert result.heads.mean.max() > 0.05


def test_effects_are_those_of_a_forward_pass_a_cell(result: experiment.Result):
    """One cell of each sweep, by hooks; effects and differences are kept for each pair."""
    model, pairs = result.model, result.pairs
    clean, corrupted = (
        model.to_tokens([pair.clean for pair in pairs]),
        model.to_tokens([pair.corrupted for pair in pairs]),
    )
    rows = torch.arange(len(pairs))

    def difference(logits: torch.Tensor) -> torch.Tensor:
        right, wrong = (
            [model.to_single_token(getattr(pair, of)) for pair in pairs] for of in ("answer", "wrong_answer")
        )
        return logits[rows, -1, right] - logits[rows, -1, wrong]

    _, cache = model.run_with_cache(clean)
    before = difference(model(corrupted))
    gap = (difference(model(clean)) - before).mean()
    logits = model(corrupted)[:, -1].abs().max() / gap.abs()  # four of them cancel in each effect
    assert_close(result.differences.values, torch.stack([difference(model(clean)), before]))

    def effect(name: str, index: tuple) -> torch.Tensor:
        def patch(value: torch.Tensor, hook: object) -> None:
            value[index] = cache[name][index]

        return (difference(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)])) - before) / gap

    every = slice(None)
    layer, head = result.top_heads(1)[0]
    of_head = effect(f"blocks.{layer}.attn.hook_z", (every, every, head))
    assert_close(result.heads.values[layer, head], of_head, scale=logits)
    for number, site in enumerate(result.sites.axes["site"]):
        of_site = effect(f"blocks.2.hook_{site}", (every, 12))
        assert_close(result.sites.values[number, 2, 12], of_site, scale=logits)


def test_heads_are_ranked_by_the_size_of_their_effect(result: experiment.Result):
    ranking = result.ranking(5)
    effects = ranking["restored"].to_list()
    assert [abs(effect) for effect in effects] == sorted(map(abs, effects), reverse=True)
    layer, head = parse_head_label(ranking["head"][0])
    assert (layer, head) == result.top_heads(1)[0]
    assert_close(effects[0], result.heads.mean[layer, head].item())
    assert_close(abs(effects[0]), result.heads.mean.abs().max().item())


def test_a_head_is_shown_where_it_acts(tmp_path: Path, result: experiment.Result):
    """Against patches by hooks of one head at one position at a time, and attention from that position."""
    model, pairs = result.model, result.pairs
    clean, corrupted = (model.to_tokens([getattr(pair, run) for pair in pairs]) for run in ("clean", "corrupted"))
    answers, wrong = (
        torch.tensor([model.to_single_token(getattr(pair, of)) for pair in pairs]) for of in ("answer", "wrong_answer")
    )
    rows = torch.arange(len(pairs))

    def ahead(logits: torch.Tensor) -> torch.Tensor:
        return (logits[rows, -1, answers] - logits[rows, -1, wrong]).mean()

    logits, cache = model.run_with_cache(clean)
    start = ahead(model(corrupted))
    page = experiment.write_report(result, tmp_path / "a.html").read_text(encoding="utf-8")
    for row in result.ranking(2).itertuples():
        layer, head = parse_head_label(row.head)
        effects = []
        for position in range(clean.shape[1]):
            where = (slice(None), position, head)
            patch = partial(_put, where=where, new=cache["z", layer][where])
            patched = model.run_with_hooks(corrupted, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", patch)])
            effects.append(((ahead(patched) - start) / (ahead(logits) - start)).item())
        position = max(range(len(effects)), key=lambda each: abs(effects[each]))
        weights = cache["pattern", layer][:, head, position].mean(0)
        acting = result.acting(head_label(layer, head))
        assert (acting.position, acting.looks_at) == (position, int(weights.argmax()))
        assert_close([acting.effect, acting.weight], [effects[position], weights.max().item()], scale=2.0)
        where = [f"{result.tokens[at].replace(' ', '·')} ({at})" for at in (position, acting.looks_at)]
        assert list(row[5:9:2]) == where
        assert re.search(rf"{row.head}[^;]* acts? at <code>{re.escape(where[0])}</code> and looks? at", page)


def _put(value: torch.Tensor, hook: object, where: tuple, new: torch.Tensor) -> None:
    value[where] = new


def test_intervals_hold_the_means(result: experiment.Result):
    for found in (result.differences, result.heads, result.sites):
        low, high = found.interval()
        assert bool((low <= found.mean + 1e-6).all() and (found.mean <= high + 1e-6).all())
    ranking = result.ranking(10)
    assert bool((ranking["low"] < ranking["restored"]).all() and (ranking["restored"] < ranking["high"]).all())
    low, high = result.heads.interval(simultaneous=True)
    layer, head = result.top_heads(1)[0]
    assert_close(ranking["low"][0], low[layer, head].item())
    assert_close(ranking["high"][0], high[layer, head].item())


@pytest.mark.slow
def test_the_same_pairs_twice_make_intervals_narrower(result: experiment.Result):
    """The means stay; of eight prompts their standard error is 1.53 times smaller, and Student's interval 1.35 times."""
    once, twice = result.heads, experiment.run(result.model, 2 * result.pairs).heads
    assert_close(once.mean, twice.mean)
    widths = [torch.sub(*reversed(found.interval()))[found.mean.abs() > 0.05] for found in (once, twice)]
    assert 1.9 < (widths[0] / widths[1]).mean() < 2.2


def test_the_report_shows_what_was_found(tmp_path: Path, result: experiment.Result):
    page = experiment.write_report(result, tmp_path / "a.html").read_text(encoding="utf-8")
    figures = {name: json.loads(data)["data"] for name, data in FIGURES.findall(page)}
    assert len(figures) == 7
    low, high = result.sites.select(site="resid_pre").interval(simultaneous=True)
    [stream] = figures["figure-2-2"]
    ends = torch.stack([low, high], -1)
    assert_close(numbers(stream["customdata"]), torch.cat([ends[:, :1], ends[:, 10:]], 1))  # ten equal tokens are one
    [strongest] = figures["figure-3-3"]
    ranking = result.ranking(8)
    assert_close(numbers(strongest["y"]).tolist(), ranking["restored"].to_list())
    below, above = (numbers(strongest["error_y"][end]) for end in ("arrayminus", "array"))
    assert_close((numbers(strongest["y"]) - below).tolist(), ranking["low"].to_list())
    assert_close((numbers(strongest["y"]) + above).tolist(), ranking["high"].to_list())
    for value in (*ranking["low"], *ranking["high"]):
        assert f'<td class="number">{value:.3f}</td>'.replace("-", "\N{MINUS SIGN}") in page
    for value in (*result.differences.mean.tolist(), *torch.stack(result.differences.interval()).flatten().tolist()):
        assert f"{value:+.2f}".replace("-", "\N{MINUS SIGN}") in page
    assert f"{result.work.layer_rows:,} instead of {result.work.layer_rows_of_forwards:,}" in page


def numbers(array: dict | list) -> torch.Tensor:
    """What plotly wrote of an array: its bytes, or a list."""
    if isinstance(array, list):
        return torch.tensor(array)
    flat = np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"])
    shape = [int(n) for n in array.get("shape", str(len(flat))).split(",")]
    return torch.from_numpy(flat.reshape(shape).copy()).float()


def test_the_work_is_counted(result: experiment.Result):
    """Against what PyTorch counts in one forward pass, without the products in attention; and against tokens times layers."""
    work, n_tokens = result.work, len(result.pairs) * len(result.tokens)
    n_layers, n_heads = result.model.cfg.n_layers, result.model.cfg.n_heads
    assert work.cells == n_layers * (3 * len(result.tokens) + n_heads * (1 + len(result.tokens)))
    assert work.layer_rows_of_forwards == work.cells * n_layers * n_tokens
    with FlopCounterMode(display=False) as counter:
        result.model([pair.corrupted for pair in result.pairs])
    assert_near(
        work.flops_of_forwards / work.cells, counter.get_total_flops(), 0.05, because="the products in attention"
    )
    assert work.flops < work.flops_of_forwards / 4
    assert work.layer_rows < work.layer_rows_of_forwards / 2


def test_pairs_differ_in_the_giver_alone():
    pairs = experiment.prompt_pairs(20)
    assert len(set(pairs)) == 20
    for pair in pairs:
        clean, corrupted = pair.clean.split(" "), pair.corrupted.split(" ")
        changed = [(a, b) for a, b in zip(clean, corrupted, strict=True) if a != b]
        assert changed == [(pair.wrong_answer[1:], pair.answer[1:])]
        assert corpus.is_held_out("indirect_object", *sorted((pair.wrong_answer[1:], pair.answer[1:])))


def test_a_model_that_cannot_tell_is_refused():
    model = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        model.unembed.W_U.zero_()
    with pytest.raises(ValueError, match="answers clean and corrupted prompts alike"):
        experiment.run(model, experiment.prompt_pairs(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "{tmp}/nowhere/report.html"], "there is no folder"),
        (["--output", "{tmp}"], "it is a folder"),
        (["--output", "{tmp}/report.html", "--n-pairs", "0"], "must be from 1 to"),
        (["--output", "{tmp}/report.html", "--n-pairs", "100000"], "must be from 1 to"),
    ],
)
def test_bad_input_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str
):
    monkeypatch.setattr(pretrained, "from_pretrained", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    shown = call("demo", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert message in shown.output
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_report_opens_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: experiment.Result):
    monkeypatch.setattr(experiment, "run", lambda model, pairs: result)
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    assert call("demo", "--output", tmp_path / "a.html").exit_code == 0
    assert opened == []
    assert call("demo", "--output", tmp_path / "a.html", "--open").exit_code == 0
    assert opened == [(tmp_path / "a.html").as_uri()]
