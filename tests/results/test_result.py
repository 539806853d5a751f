"""What a sweep found: its means and intervals, parts of it, tables, figures and files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hooked_lm.analysis.reading.images import ImageScores
from hooked_lm.engine.result import SweepResult
from hooked_lm.results import Scores
from tests.close import LAYER, assert_close, assert_equal

METRICS, LAYERS, POSITIONS, PROMPTS = (
    ["difference", "probability"],
    [0, 1, 2],
    ["0 <bos>", "1 When", "2 Mary", "3 When"],
    5,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def result(metrics: bool = True, clean: bool = True) -> SweepResult:
    axes = {"metric": METRICS} if metrics else {}
    lead = [2] if metrics else []
    return SweepResult(
        draw(*lead, 3, 4, PROMPTS),
        {**axes, "layer": LAYERS, "position": POSITIONS},
        draw(*lead, PROMPTS, seed=1) - 3,
        draw(*lead, PROMPTS, seed=2) + 3 if clean else None,
        {"forwards": 2, "layer_rows": 10, "flops": 3e12, "seconds": 0.1},
    )


def same(one: SweepResult, other: SweepResult) -> bool:
    tensors = zip((one.values, one.corrupted, one.clean), (other.values, other.corrupted, other.clean), strict=True)
    equal = [a is b is None or torch.equal(bits(a), bits(b)) for a, b in tensors]
    return all(equal) and (dict(one.axes), one.cost) == (dict(other.axes), other.cost)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


# ---- missing cells ---------------------------------------------------------------------------------------------------


def test_missing_cells_are_nan_and_spoil_no_others():
    values = draw(3, 4, PROMPTS)
    found = SweepResult(values, {"layer": LAYERS, "head": [0, 1, 2, 3]}, torch.zeros(PROMPTS), torch.ones(PROMPTS))
    values[2, 1] = torch.nan
    holed = SweepResult(values, found.axes, torch.zeros(PROMPTS), torch.ones(PROMPTS))
    whole = torch.stack([found.mean, *found.interval()])
    part = torch.stack([holed.mean, *holed.interval()])
    assert part[:, 2, 1].isnan().all()
    part[:, 2, 1] = whole[:, 2, 1]
    assert torch.equal(part, whole)
    assert len(holed.to_dataframe()) == 12
    assert len(holed.to_dataframe().dropna()) == 11
    assert len(holed.top(100)) == 11
    assert torch.from_numpy(holed.plot().data[0].z).isnan().sum() == 1
    assert "nan" not in repr(holed)
    assert holed.normalized().mean[2, 1].isnan()


# ---- scales and parts ------------------------------------------------------------------------------------------------


def test_normalized_lies_between_the_mean_baselines_of_each_metric():
    plain = result()
    found = plain.normalized()
    for metric in range(2):
        corrupted, clean = plain.corrupted[metric].mean(), plain.clean[metric].mean()
        expected = (plain.values[metric] - corrupted) / (clean - corrupted)
        assert_close(found.values[metric], expected)
    gaps = (plain.clean - plain.corrupted).mean(-1).abs()
    assert_close(found.corrupted.mean(-1), torch.zeros(2), scale=plain.corrupted / gaps[:, None])  # baselines cancel
    assert_close(found.clean.mean(-1), torch.ones(2))
    assert_close(found.normalized().values, found.values)
    one = result(metrics=False)
    expected = (one.values - one.corrupted.mean()) / (one.clean.mean() - one.corrupted.mean())
    assert_close(one.normalized().values, expected)


def test_there_is_no_scale_without_two_ends():
    with pytest.raises(ValueError, match=r"no clean baseline.*effects\(\), which needs none"):
        result(clean=False).normalized()
    equal = result()
    clean = torch.stack([equal.clean[0], equal.corrupted[1] + 5e-7])
    flat = SweepResult(equal.values, equal.axes, equal.corrupted, clean)
    with pytest.raises(
        ValueError, match=r"the clean mean of 'probability' is .*, the corrupted mean .*more than 4\.5e-06"
    ):
        flat.normalized()


def test_effects_are_differences_of_the_same_prompt():
    plain = result()
    found = plain.effects()
    assert torch.equal(found.values, plain.values - plain.corrupted[:, None, None])
    assert not found.corrupted.any()
    assert torch.equal(found.clean, plain.clean - plain.corrupted)
    assert result(clean=False).effects().clean is None


def test_select():
    plain = result()
    found = plain.select(layer=[2, 0], position="2 Mary")
    assert dict(found.axes) == {"metric": tuple(METRICS), "layer": (2, 0)}
    assert torch.equal(found.values, plain.values[:, [2, 0], 2])
    assert torch.equal(found.corrupted, plain.corrupted)
    one = plain.select(metric="probability")
    assert list(one.axes) == ["layer", "position"]
    assert torch.equal(one.values, plain.values[1])
    assert torch.equal(one.corrupted, plain.corrupted[1])
    assert torch.equal(one.clean, plain.clean[1])
    assert same(plain.select(layer=range(1, 3)), plain.select(layer=[1, 2]))
    assert same(plain.select(layer=plain.top().layer[0]), plain.select(layer=int(plain.top().layer[0])))
    swapped = plain.select(metric=METRICS[::-1])
    assert torch.equal(swapped.clean, plain.clean.flip(0))
    cell = plain.select(metric="difference", layer=1, position="3 When")
    assert not cell.axes
    assert torch.equal(cell.values, plain.values[0, 1, 3])
    assert cell.mean.shape == ()
    assert cell.cost == plain.cost


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"head": 1}, "no axis 'head'; the axes are metric, layer, position"),
        ({"layer": 3}, "axis 'layer' has no label 3; its labels are 0, 1, 2"),
        ({"layer": -4}, "axis 'layer' has no label -4"),
        ({"layer": True}, "axis 'layer' has no label True"),
        ({"position": ["0 <bos>", 4]}, "axis 'position' has no label 4"),
        ({"position": "Marry"}, r"no label 'Marry'; did you mean '2 Mary'\?; its labels are '0 <bos>'"),
        ({"position": "When"}, "'When' is 2 labels of axis 'position': '1 When', '3 When'; give one of these"),
        ({"metric": "diference"}, r"no label 'diference'; did you mean 'difference'\?"),
        ({"metric": 2}, "axis 'metric' has no label 2"),
        ({"layer": [1, 1]}, "axis 'layer' has the label 1 twice"),
        ({"layer": [2, -1]}, "axis 'layer' has the label 2 twice"),
    ],
)
def test_unknown_and_ambiguous_labels(labels: dict, says: str):
    with pytest.raises(ValueError, match=says):
        result().select(**labels)


@pytest.mark.parametrize(
    ("wanted", "label"),
    [
        ({"position": 2}, "2 Mary"),
        ({"position": "Mary"}, "2 Mary"),
        ({"position": -1}, "3 When"),
        ({"position": [-2, 0]}, ["2 Mary", "0 <bos>"]),
        ({"position": torch.tensor([3, 1])}, ["3 When", "1 When"]),
        ({"layer": -1}, 2),
        ({"layer": torch.tensor(1)}, 1),
        ({"metric": 1}, "probability"),
        ({"metric": -2}, "difference"),
    ],
)
def test_select_by_index_and_by_token(wanted: dict, label: object):
    [axis] = wanted
    assert same(result().select(**wanted), result().select(**{axis: label}))


def test_positions_are_found_by_their_number_in_a_part():
    part = result().select(position=["1 When", "3 When"])
    assert same(part.select(position=3), part.select(position="3 When"))
    assert same(part.select(position=-1), part.select(position="3 When"))
    with pytest.raises(ValueError, match="no label 0"):
        part.select(position=0)
    with pytest.raises(ValueError, match="no label -1"):  # the last entry is not the last position
        result().select(position=[3, 1]).select(position=-1)


def test_negative_labels_are_labels():
    values = draw(3, PROMPTS)
    found = SweepResult(values, {"coefficient": [-2, 0, 2]}, torch.zeros(PROMPTS))
    assert torch.equal(found.select(coefficient=-2).values, values[0])
    with pytest.raises(ValueError, match="axis 'coefficient' has no label -1"):
        found.select(coefficient=-1)


def test_select_heads_by_their_labels():
    axes = {"from_layer": [0, 1], "from_head": [0, 1, 2], "layer": LAYERS, "head": [0, 1, "mlp"]}
    scores = Scores(draw(2, 3, 3, 3, 1), axes)
    one = scores.select(head="L2H1", from_head=["L1H2", "L1H0"])
    assert dict(one.axes) == {"from_head": (2, 0)}
    assert torch.equal(one.values, scores.values[1, [2, 0], 2, 1])
    assert torch.equal(scores.select(layer=2, head="L2H1").values, scores.values[:, :, 2, 1])
    for wanted, says in (
        ({"head": "L2H1", "layer": 1}, "head 'L2H1' is in layer 2, and layer=1 was given"),
        ({"head": ["L2H1", "L1H1"]}, "select heads of one layer at a time"),
        ({"head": "L2H2"}, "axis 'head' has no label 2"),
        ({"head": "L3H1"}, "axis 'layer' has no label 3"),
        ({"head": -1}, "axis 'head' has no label -1"),
    ):
        with pytest.raises(ValueError, match=says):
            scores.select(**wanted)
    with pytest.raises(ValueError, match="axis 'head' has no label 'L2H1'"):
        scores.select(layer=2).select(head="L2H1")  # the layer of these heads is no longer known


# ---- tables and figures ----------------------------------------------------------------------------------------------


def test_tables_hold_every_number():
    plain = result()
    table = plain.to_dataframe()
    assert list(table.columns) == ["metric", "layer", "position", "mean", "low", "high"]
    cell = table[(table.metric == "probability") & (table.layer == 2) & (table.position == "1 When")]
    low, high = plain.interval()
    expected = [plain.mean[1, 2, 1], low[1, 2, 1], high[1, 2, 1]]
    assert_close(cell[["mean", "low", "high"]].to_numpy()[0].tolist(), [float(number) for number in expected])
    long = plain.to_dataframe(per_prompt=True)
    assert len(long) == plain.values.numel()
    means = long.groupby(["metric", "layer", "position"], sort=False)["value"].mean()
    assert_close(means.to_numpy(), plain.mean.flatten().numpy())
    assert long[long.prompt == 3]["value"].tolist() == plain.values[..., 3].flatten().tolist()
    wide = plain.to_dataframe(level=0.5)
    assert (wide.high - wide.low < table.high - table.low).all()


def test_the_table_of_one_cell():
    cell = result().select(metric="difference", layer=1, position="3 When")
    assert_close(cell.to_dataframe().to_numpy()[0, 0], float(cell.mean))
    assert len(cell.to_dataframe(per_prompt=True)) == PROMPTS
    assert list(cell.top().columns) == ["effect", "low", "high", "value"]
    [bar] = cell.plot().data
    assert_close(float(bar.base + bar.y[0]), float(cell.mean))


def test_top_is_by_the_size_of_the_effect():
    plain = result()
    values = plain.corrupted[:, None, None].expand(2, 3, 4, PROMPTS).clone()
    values[0, 2, 1] -= 9
    values[0, 0, 3] += torch.arange(PROMPTS) - 1
    values[1, 1, 1] += 0.5
    found = SweepResult(values, plain.axes, plain.corrupted).top(2)
    assert list(found.columns) == ["metric", "layer", "position", "effect", "low", "high", "value"]
    assert found[["metric", "layer", "position"]].to_numpy()[:3].tolist() == [
        ["difference", 2, "1 When"],
        ["difference", 0, "3 When"],
        ["probability", 1, "1 When"],
    ]
    assert len(found) == 4
    assert_close(found.effect.to_numpy()[:3], [-9, 1, 0.5])
    assert_close(found.value[0], float(values[0, 2, 1].mean()))
    # every prompt changes by 9, so nothing is uncertain about it; the second differs from prompt to prompt
    assert_close(found[["low", "high"]].to_numpy()[0], [-9, -9])
    assert found.low[1] < 0.3 < 1 < 1.7 < found.high[1]
    assert len(SweepResult(values[0], {"layer": LAYERS, "position": POSITIONS}, plain.corrupted[0]).top(100)) == 12


@pytest.mark.parametrize(
    ("changed", "base", "name", "further"),
    [
        (lambda plain: plain, "corrupted", "effect", ["value"]),
        (lambda plain: plain.effects(), "corrupted", "effect", []),
        (lambda plain: plain.normalized(), "corrupted", "restored", []),
        (lambda plain: plain.restored(), "corrupted", "restored", []),
        (lambda plain: plain.effects().normalized(), "corrupted", "restored", []),
        (lambda plain: plain.normalized(), "clean", "effect", ["kept"]),  # the clean run is 1
        (lambda plain: plain.restored(), "clean", "effect", ["kept"]),
        (lambda plain: plain.effects().normalized(), "clean", "effect", []),
    ],
)
def test_the_largest_cells_say_what_their_numbers_are_once(changed: Callable, base: str, name: str, further: list[str]):
    shown = changed(replace(result(), base=base)).select(metric="difference")
    table = shown.top(3)
    assert list(table.columns) == ["layer", "position", name, "low", "high", *further]
    assert name == "effect" or shown.plot().data[0].colorbar.title.text == name
    if further:
        assert (table[further[0]] - table.effect).abs().min() > 0.1
    assert all(f">{column}</th>" in shown._repr_html_() for column in (name, *further))


def test_the_largest_cells_of_one_prompt_have_no_interval():
    values = torch.tensor([[1.0], [3.0]])
    assert Scores(values, {"layer": [0, 1]}).top().to_dict("list") == {"layer": [1, 0], "value": [3, 1]}
    sweep = SweepResult(values, {"layer": [0, 1]}, torch.ones(1))
    assert list(sweep.to_dataframe().columns) == ["layer", "mean"]
    assert list(replace(sweep, values=values.expand(2, 3), corrupted=torch.ones(3)).to_dataframe()) == [
        *("layer", "mean", "low", "high")
    ]
    assert sweep.top().to_dict("list") == {"layer": [1, 0], "effect": [2, 0], "value": [3, 1]}
    assert list(sweep.effects().top().columns) == ["layer", "effect"]
    assert "nan" not in sweep._repr_html_()


def test_a_heat_map_has_positions_from_left_to_right():
    plain = result().select(metric=["difference"])
    figure = plain.plot()
    assert torch.equal(torch.from_numpy(figure.data[0].z), plain.mean[0])
    assert figure.layout.title.subtitle.text.endswith("metric difference")
    assert figure.layout.xaxis.title.text == "position"
    assert figure.layout.xaxis.ticktext == ("&lt;bos&gt;", "When (1)", "Mary", "When (3)")
    assert figure.layout.yaxis.range == (-0.5, 2.5)  # layer 0 is at the bottom
    turned = SweepResult(plain.values[0].transpose(0, 1), {"position": POSITIONS, "layer": LAYERS}, plain.corrupted[0])
    assert_close(torch.from_numpy(turned.plot().data[0].z), plain.mean[0], LAYER)
    low, high = plain.interval(simultaneous=True)
    assert_close(torch.from_numpy(turned.plot().data[0].customdata), torch.stack([low[0], high[0]], -1))
    assert turned.plot(title="T").layout.title.text == "T"


def test_white_is_the_unchanged_run():
    plain = result().select(metric="difference")
    baseline = float(plain.corrupted.mean())
    spread = plain.values - plain.mean[..., None]
    effects = torch.linspace(-1.0, 2.0, spread[..., 0].numel()).view_as(plain.mean)
    both = SweepResult(baseline + effects[..., None] + spread, plain.axes, plain.corrupted)
    [trace] = both.plot().data
    assert_close((trace.zmin, trace.zmax), (baseline - 2, baseline + 2))
    names = [text.split()[-1] for text in trace.colorbar.ticktext]
    assert "unchanged" in names, "there is one run alone"
    above = SweepResult(baseline + effects.abs()[..., None] + spread, plain.axes, plain.corrupted)
    [trace] = above.plot().data
    assert_close((trace.zmin, trace.zmax), (baseline, baseline + 2))
    assert trace.colorscale[0] == (0, "#ffffff")
    values = baseline + 1 - effects.abs()[..., None] + spread
    noised = SweepResult(values, plain.axes, plain.corrupted, plain.corrupted + 1, base="clean")
    [trace] = noised.plot().data
    assert_close((trace.zmin, trace.zmax), (baseline - 1, baseline + 1))  # all values are below that of the clean run
    assert noised.plot().layout.title.subtitle.text.startswith("noising")
    assert noised.normalized().plot().data[0].colorbar.title.text == "kept"
    assert plain.effects().plot().data[0].colorbar.title.text == "change of difference"


def test_titles_say_what_is_measured_and_by_what():
    axes = {"later_layer": [0, 1], "head": [0, 1, 2], "kind": ["a"]}
    scores = Scores(torch.rand(2, 3, 1, 4), axes, about={"of": "copying score"})
    figure = scores.plot()
    assert figure.layout.title.text == "Copying score by later layer and head"
    assert figure.layout.yaxis.title.text == "later layer"
    assert scores.select(head=0).plot().layout.title.text == "Copying score by later layer"
    assert scores.select(head=0, later_layer=1).plot().layout.title.text == "Copying score"
    assert replace(scores, about={}).plot().layout.title.text == ""


def test_statistics_have_scales_of_their_own():
    values = torch.stack([torch.rand(2, 3), 100 * torch.rand(2, 3)])[..., None]
    found = Scores(
        values, {"statistic": ["entropy", "distance"], "layer": [0, 1], "head": [0, 1, 2]}, about={"of": "it"}
    )
    figure = found.plot()
    assert figure.layout.title.text == "It by layer and head"
    assert figure.data[1].zmax > 10 * figure.data[0].zmax
    assert [panel.text for panel in figure.layout.annotations] == ["entropy", "distance"]


def test_names_are_bars_and_amounts_are_lines():
    row = result(metrics=False).select(layer=1)
    [bars] = row.plot().data
    assert_close(torch.from_numpy(bars.y) + bars.base, row.mean)
    low, _ = row.interval(simultaneous=True)
    assert_close(torch.from_numpy(bars.y) + bars.base - torch.from_numpy(bars.error_y.arrayminus), low)
    ribbon, line = result(metrics=False).select(position=2).plot().data
    assert (list(line.x), line.mode, ribbon.fill) == (LAYERS, "lines+markers", "toself")
    heads = Scores(torch.rand(3, 1), {"head": [0, 1, 2]}).plot()
    assert (heads.data[0].type, heads.data[0].error_y.array) == ("bar", None)
    training = Scores(torch.rand(5, 2, 1), {"step": range(5), "loss": ["reconstruction", "sparsity"]})
    assert [trace.name for trace in training.plot().data] == ["reconstruction", "sparsity"]
    assert_close(torch.tensor(training.plot().data[1].y), training.mean[:, 1])


def test_three_axes_are_panels():
    found = result()
    figure = found.plot()
    assert [panel.text for panel in figure.layout.annotations] == ["difference", "probability"]
    for trace, mean, baseline in zip(figure.data, found.mean, found.corrupted.mean(-1), strict=True):
        assert torch.equal(torch.from_numpy(trace.z), mean)
        assert trace.zmin <= float(baseline) <= trace.zmax
        assert trace.showscale
    sites = Scores(torch.rand(3, 2, 4, 2), {"site": ["q", "k", "v"], "layer": [0, 1], "head": range(4)}).plot()
    assert len({(trace.zmin, trace.zmax) for trace in sites.data}) == 1
    assert [trace.showscale for trace in sites.data] == [True, False, False]
    assert sites.layout.annotations[2].text == "site v"


def test_layers_and_heads_of_many_axes_become_one():
    axes = {"layer": [0, 1], "head": [0, 1, 2], "later_layer": [0, 1], "later_head": [0, 1, 2]}
    pairs = Scores(torch.arange(36.0).view(2, 3, 2, 3, 1), axes, about={"of": "K-composition score"})
    [cells] = pairs.plot().data
    assert torch.equal(torch.from_numpy(cells.z), torch.arange(36.0).view(6, 6))
    figure = pairs.plot()
    assert (
        figure.layout.yaxis.ticktext == figure.layout.xaxis.ticktext == ("L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2")
    )
    assert (figure.layout.yaxis.title.text, figure.layout.xaxis.title.text) == ("head", "later head")
    assert len(pairs.select(later_layer=1).plot().data) == 2  # three axes stay as they are: a panel for each layer


def test_more_axes_or_panels_than_a_figure_has():
    with pytest.raises(ValueError, match=r"a figure has three axes, and a, b, c, d are left: plot select\(a='0'\)"):
        Scores(torch.rand(2, 2, 2, 2, 1), {name: ["0", "1"] for name in "abcd"}).plot()
    with pytest.raises(ValueError, match=r"40 panels are more than 32: plot select\(head=\[0, 1\]\)"):
        Scores(torch.rand(40, 2, 2, 1), {"head": range(40), "layer": [0, 1], "x": [0, 1]}).plot()
    with pytest.raises(ValueError, match=r"20 lines are more than 12: plot select\(head=\[...\]\)"):
        Scores(torch.rand(20, 3, 1), {"head": range(20), "step": range(3)}).plot()


def test_repr_of_a_result():
    assert repr(result()) == "SweepResult(metric 2 x layer 3 x position 4, 5 prompts; metrics difference, probability)"
    one = SweepResult(torch.full((1, 1), 0.25), {"layer": [0]}, torch.ones(1))
    assert repr(one) == "SweepResult(layer 1, 1 prompt; means 0.25 to 0.25, corrupted 1)"
    html = result()._repr_html_()
    assert "5 prompts" in html
    assert "0 &lt;bos&gt;" in html or "1 When" in html
    assert html.count("<tr") == 1 + 2 * 5


# ---- files and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"metrics": False}, {"clean": False}])
def test_files_restore_everything(tmp_path: Path, kind: dict):
    plain = result(**kind)
    plain.values[..., 0, 0, :] = torch.nan
    plain.values[..., 1, 0, 0] = -torch.inf
    plain.save(tmp_path / "sweep")
    assert same(SweepResult.load(tmp_path / "sweep"), plain)
    assert [file.name for file in tmp_path.iterdir()] == ["sweep"]
    SweepResult.load(tmp_path / "sweep").save(str(tmp_path / "sweep"))  # over the file it came from
    assert same(SweepResult.load(str(tmp_path / "sweep")), plain)


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = result()
    plain.save(tmp_path / "sweep")

    def interrupted(tensors: dict, path: Path, about: dict) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain.select(layer=0).save(tmp_path / "sweep")
    assert same(SweepResult.load(tmp_path / "sweep"), plain)
    assert [file.name for file in tmp_path.iterdir()] == ["sweep"]


def test_foreign_files(tmp_path: Path):
    (tmp_path / "text").write_text("no tensors here, but a text of some length")
    with pytest.raises(ValueError, match="text is not a safetensors file"):
        SweepResult.load(tmp_path / "text")
    save_file({"values": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"weights is not a file of type SweepResult: its header names no type"):
        SweepResult.load(tmp_path / "weights")
    with pytest.raises(FileNotFoundError):
        SweepResult.load(tmp_path / "nothing")


def test_a_result_keeps_its_own_numbers():
    values = draw(3, 2)
    found = SweepResult(values, {"layer": LAYERS}, torch.zeros(2))
    values += 1
    assert_close(found.values, values - 1)


def test_tensors_are_kept_in_fp32_without_gradients():
    values = draw(3, 2).bfloat16().requires_grad_()
    found = SweepResult(values, {"layer": LAYERS}, torch.zeros(2, dtype=torch.float64))
    assert found.values.dtype == found.corrupted.dtype == torch.float32
    assert not found.values.requires_grad
    assert torch.equal(found.values, values.detach().float())


@pytest.mark.parametrize(
    ("values", "axes", "corrupted", "says"),
    [
        ((3, 4), {"layer": [0, 1]}, (4,), r"values \[3, 4\] do not have the axes {'layer': 2} and the prompts"),
        ((3, 2, 4), {"layer": LAYERS}, (4,), r"values \[3, 2, 4\] do not have the axes {'layer': 3}"),
        ((), {}, (4,), r"values \[\] do not have the axes {}"),
        ((3, 4), {"layer": LAYERS}, (5,), r"corrupted baseline must be \[4\], got \[5\]"),
        ((2, 3, 4), {"metric": METRICS, "layer": LAYERS}, (4,), r"corrupted baseline must be \[2, 4\], got \[4\]"),
        ((3, 2, 4), {"layer": LAYERS, "metric": METRICS}, (2, 4), r"first axis, these are \['layer', 'metric'\]"),
        ((2, 4), {"position": ["a", "a"]}, (4,), "axis 'position' has the label 'a' twice"),
        ((2, 4), {"mean": [0, 1]}, (4,), "an axis cannot be called 'mean'"),
        ((2, 4), {"layer": [0, True]}, (4,), "axis 'layer' has True"),
    ],
)
def test_shapes_and_labels_that_do_not_go_together(values: tuple, axes: dict, corrupted: tuple, says: str):
    with pytest.raises(ValueError, match=says):
        SweepResult(torch.zeros(values), axes, torch.zeros(corrupted))


def test_the_chosen_metric_names_the_values():
    scores = Scores(torch.rand(2, 3, 4, 1), {"metric": ["auc", "probe_accuracy"], "layer": range(3), "head": range(4)})
    for chosen in ("auc", ["auc"]):
        assert scores.select(metric=chosen).plot().data[0].colorbar.title.text == "auc"
    figure = scores.select(metric="probe_accuracy").plot()
    assert figure.data[0].colorbar.title.text == "probe accuracy"
    assert figure.layout.title.text == "Probe accuracy by layer and head"


def test_heads_beside_other_names_are_named():
    figure = Scores(torch.rand(2, 3, 1), {"layer": range(2), "head": [0, 1, "mlp"]}).plot()
    assert figure.layout.xaxis.ticktext == ("H0", "H1", "mlp")


def test_a_figure_of_a_part_says_which_part_it_is() -> None:
    def subtitle(shown: SweepResult) -> str:
        return str(shown.plot().layout.title.subtitle.text)

    assert "layer 1" in subtitle(result().select(layer=1))
    assert "layer 1" not in subtitle(result())
    assert "each value is that of the" in subtitle(result())
    assert "each value is what one change adds to that of the" in subtitle(result().effects())


def test_intervals_that_are_drawn_are_named_below_the_title() -> None:
    values = torch.randn(3, 4, 5)
    said = "mean of 5 prompts, with 95% intervals of all 3 cells at once"
    for axis, labels in {"head": ["a", "b", "c"], "layer": [0, 1, 2]}.items():
        figure = Scores(values[:, 0], {axis: labels}).plot()
        assert figure.layout.title.subtitle.text == said
        assert said not in str(figure.data)  # once
    grid = Scores(values, {"layer": [0, 1, 2], "head": [0, 1, 2, 3]}).plot()
    assert "95% intervals of all 12 cells" in grid.data[0].hovertemplate  # where they are, on hover
    assert grid.layout.title.subtitle.text is None


def test_heads_and_other_parts_of_layers_are_a_map() -> None:
    parts = ["embed", *(f"{of}" for i in (1, 0) for of in (f"L{i}H0", f"L{i}H1", f"{i}_mlp_out")), "bias"]
    scores = Scores(torch.arange(24.0).view(8, 1, 3), {"component": parts, "prompts": ["both"]})
    figure = scores.plot()
    [cells] = figure.data
    assert_equal(torch.from_numpy(cells.z), scores.mean[[4, 5, 6, 1, 2, 3], 0].view(2, 3))
    assert figure.layout.xaxis.ticktext == ("H0", "H1", "mlp out")
    assert figure.layout.yaxis.ticktext == ("0", "1")
    assert figure.layout.title.subtitle.text == "not in a layer: embed 1, bias 22; prompts both"
    for fewer in (parts[:-2], parts[:4], ["embed", "1_mlp_out", "0_mlp_out"]):  # layers with other parts, one, no heads
        assert scores.select(component=fewer).plot().data[0].type == "bar"


def test_patches_with_places_lie_over_the_image() -> None:
    patches = [0, "0,0", "0,1", "1,0", "1,1"]
    scores = Scores(torch.randn(2, 5, 3), {"layer": [0, 1], "patch": patches})
    figure = scores.plot()
    low, _ = scores.interval(simultaneous=True)
    assert_equal(torch.from_numpy(figure.data[1].z), scores.mean[1, 1:].view(2, 2))
    assert_close(torch.from_numpy(figure.data[1].customdata[..., 0]), low[1, 1:].view(2, 2))
    assert [title.text for title in figure.layout.annotations] == ["layer 0", "layer 1"]
    many = ImageScores(
        torch.rand(5, 4, 5, 1), {"layer": range(5), "head": range(4), "patch": patches}, image=torch.rand(3, 4, 4)
    )
    titles = [title.text for title in many.plot().layout.annotations]
    assert (titles[0], len(titles)) == ("image", 15)
    sums = many.mean[..., 1:].sum(-1)
    assert f"L{int(sums.max(1).values.argmax())}H{int(sums.max(0).values.argmax())}" in titles
    assert many.plot().layout.title.subtitle.text == "the 14 largest of 20"
    without = Scores(many.values, many.axes)
    assert len(without.plot().data) == 5  # too many panels: a map for each layer
    assert Scores(torch.rand(3, 1), {"patch": [0, 1, 2]}).plot().data[0].type == "scatter"
