"""`sites`: the names of everything that a model computes."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import load
from hooked_lm.cli.options import ModelArgument
from hooked_lm.cli.output import say, show_table
from hooked_lm.cli.prompts_and_sites import sites_of

if TYPE_CHECKING:
    from torch import Tensor

    from hooked_lm.hooks import HookPoint
    from hooked_lm.models.decoder import Decoder

LAYER = re.compile(r"\.(\d+)(?=\.)")
OF_INPUTS = re.compile(r"batch|text|image|patch|block|routed|global_token|(\w+_)?pos")  # axes as long as the inputs


@command("hooked-lm sites demo --match '*attn*'")
def sites(
    model: ModelArgument,
    match: Annotated[
        str, typer.Option(help="Only some sites: a short name, such as z or z1, a full name or a glob.")
    ] = "*",
) -> Result:
    """List the sites of a model with their axes and shapes.

    Axes whose size depends on the inputs have a name in a shape. Sites on demand are computed only when a hook or a filter names
    them.
    """
    loaded = load(model)
    names = set(sites_of(loaded, [match]))
    points = {name: point for name, point in loaded.all_points().items() if name in names}
    shapes = _shapes(loaded, points)
    found = [
        {"site": name, "axes": list(point.dims), "shape": shapes.get(name), "on_demand": point.on_demand}
        for name, point in points.items()
    ]
    layers: dict[tuple[str, str, str], list[str]] = {}  # of each row
    for name, point in points.items():
        sizes = zip(point.dims, shapes.get(name, point.dims), strict=True)
        axes = " ".join(axis if str(size) == axis else f"{axis}={size}" for axis, size in sizes)
        row = LAYER.sub(".{}", name, count=1), axes, "on demand" if point.on_demand else ""
        layers.setdefault(row, []).extend(LAYER.findall(name)[:1])
    rows = [{"site": row.replace("{}", _range(of)), "axes": axes, "": when} for (row, axes, when), of in layers.items()]
    show_table(rows)
    say(f"{len(points)} sites; a short name with a layer means one of them: ('z', 0), ('resid_post', -1)")
    return {"model": model, "sites": found}


def _shapes(model: "Decoder", points: Mapping[str, "HookPoint"]) -> dict[str, list[str | int]]:
    """The sizes of the axes of each site in a run of the random inputs of `verify`, which reaches all of them."""
    found: dict[str, list[str | int]] = {}

    def record(value: "Tensor", hook: "HookPoint") -> None:
        if len(hook.dims) == value.ndim:  # hooks on demand change others, as copies of a norm's input for each head
            sizes = zip(hook.dims, value.shape, strict=True)
            found.setdefault(hook.name or "", [axis if OF_INPUTS.fullmatch(axis) else size for axis, size in sizes])

    for on_demand in (False, True):
        if names := [name for name, point in points.items() if point.on_demand is on_demand]:
            with model.hooks([(names, record)]):
                model.verify()
    return found


def _range(layers: list[str]) -> str:
    """`{0-3}` of layers in a row, else `{0,2}`."""
    numbers = list(map(int, layers))
    if len(numbers) == 1:
        return layers[0]
    in_a_row = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
    return f"{{{numbers[0]}-{numbers[-1]}}}" if in_a_row else f"{{{','.join(layers)}}}"
