"""Figures of values over the places of an image."""

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from hooked_lm.viz import image_heat_map
from hooked_lm.viz.figure import WIDEST
from hooked_lm.viz.theme import dark_colours
from tests.unchecked import unchecked


def test_a_cell_lies_over_its_part_of_the_image() -> None:
    """Row 1, column 2 of a grid of 2 x 4 covers the pixels of rows 10 to 19 and columns 20 to 29."""
    image = torch.zeros(3, 20, 40)
    image[:, 10:20, 20:30] = 1.0
    values = torch.zeros(2, 4)
    values[1, 2] = 5.0
    figure = image_heat_map(values, image)
    picture, cells = figure.data[0], figure.data[-1]
    assert cells.z[1][2] == 5.0
    lit = np.argwhere(np.array(picture.z)[..., 0] == 255)
    x, y = picture.x0 + picture.dx * lit[:, 1], picture.y0 + picture.dy * lit[:, 0]
    assert 1.5 < x.min() < x.max() < 2.5
    assert 0.5 < y.min() < y.max() < 1.5
    assert (figure.layout.xaxis.range, figure.layout.yaxis.range) == ((-0.5, 3.5), (1.5, -0.5))


def test_panels_share_a_scale_and_show_the_image_in_grey() -> None:
    figure = image_heat_map(torch.tensor([[[1.0]], [[-3.0]]]), torch.rand(1, 6, 6), panels=["layer 0", "layer 1"])
    maps = [trace for trace in figure.data if isinstance(trace, go.Heatmap)]
    assert [(trace.zmin, trace.zmax) for trace in maps] == [(-3.0, 3.0)] * 2
    assert [note.text for note in figure.layout.annotations] == ["image", "layer 0", "layer 1"]
    assert len(image_heat_map(torch.rand(2, 3)).data) == 1
    [above], [below] = (image_heat_map(sign * torch.tensor([[0.0, 2.0]])).data for sign in (1, -1))
    assert (above.zmin, above.zmax, above.colorscale[0]) == (0.0, 2.0, (0.0, "#ffffff"))
    assert (below.zmin, below.zmax, below.colorscale[1]) == (-2.0, 0.0, (1.0, "#ffffff"))


def test_images_have_dark_counterparts() -> None:
    figure = image_heat_map(torch.tensor([[1.0, -1.0]]), torch.rand(3, 4, 8))
    colours = dark_colours()
    for _, colour in figure.data[-1].colorscale:
        assert colours[colour].startswith("rgba(")
    whole, pale = (trace for trace in figure.data if isinstance(trace, go.Image))
    assert (whole.meta["pale"], pale.meta["pale"]) == (False, True)
    pixels = np.array(pale.z, dtype=int) + int(colours["pale"])
    assert 20 <= pixels.min() <= pixels.max() <= 122


class Picture:
    """What a picture of pillow is known by."""

    def convert(self, mode: str) -> np.ndarray:
        return np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


def test_arrays_and_pictures_of_pillow_are_read() -> None:
    values = torch.rand(2, 2)
    expected = image_heat_map(values, torch.from_numpy(Picture().convert("RGB")).permute(2, 0, 1))
    found = image_heat_map(values.numpy(), Picture())
    assert found.to_json() == image_heat_map(values.tolist(), Picture()).to_json() == expected.to_json()


def test_other_values_and_pictures_are_refused() -> None:
    with unchecked():
        with pytest.raises(ValueError, match=r"values are \[row, column\], .* got \(36,\): .*patch_grid"):
            image_heat_map(torch.rand(36))
        with pytest.raises(TypeError, match="values are a tensor, an array or lists of numbers, got str"):
            image_heat_map("values")
        with pytest.raises(ValueError, match=r"no values to draw: they are \(0, 2\)"):
            image_heat_map(torch.zeros(0, 2))
        with pytest.raises(ValueError, match=r"the image \(1, 2, 2\) needs pixels that are all finite"):
            image_heat_map(torch.rand(2, 2), torch.full((1, 2, 2), torch.nan))
        with pytest.raises(TypeError, match="a tensor, an array or a picture of pillow, got str"):
            image_heat_map(torch.rand(2, 2), "a.png")


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="1 titles for 2 panels"):
        image_heat_map(torch.rand(2, 3, 3), panels=["one"])
    with pytest.raises(ValueError, match=r"1 or 3 channels, got \(2, 4, 4\)"):
        image_heat_map(torch.rand(3, 3), torch.rand(2, 4, 4))


def test_cells_without_a_value_are_hatched_and_counted():
    values = torch.tensor([[1.0, torch.nan], [0.5, 0.25]])
    figure = image_heat_map(values, torch.rand(3, 4, 4))
    holes, hatch = figure.data[-2:]
    assert holes.hovertemplate == "row %{y}, column %{x}<br>no value<extra></extra>"
    assert (hatch.fillpattern.shape, max(hatch.x[:5]), min(hatch.y[:5])) == ("/", 1.48, -0.47)
    assert figure.layout.title.subtitle.text == "1 of 4 without a value"
    assert len(image_heat_map(values.nan_to_num()).data) == 1


@pytest.mark.parametrize("n", [1, 4, 6])
def test_panels_shrink_to_the_width_of_a_page(n: int) -> None:
    figure = image_heat_map(torch.rand(n, 4, 4))
    assert figure.layout.width <= WIDEST
    assert figure.layout.height > 90
