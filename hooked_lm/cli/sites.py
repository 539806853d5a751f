"""`sites`: the names of everything that a model computes."""

import re
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import load
from hooked_lm.cli.options import ModelArgument
from hooked_lm.cli.output import say, show_table

LAYER = re.compile(r"\.(\d+)(?=\.)")


@command("hooked-lm sites demo --match '*attn*'")
def sites(
    model: ModelArgument,
    match: Annotated[str, typer.Option(help="A glob: only sites whose names match.")] = "*",
) -> Result:
    """List the sites of a model with their axes.

    Sites on demand are computed only when a hook or a filter names them.
    """
    points = {name: point for name, point in load(model).all_points().items() if fnmatchcase(name, match)}
    if not points:
        raise ValueError(f"{model} has no site that matches {match!r}; without --match all are listed")
    found = [{"site": name, "axes": list(point.dims), "on_demand": point.on_demand} for name, point in points.items()]
    layers: dict[str, list[str]] = {}
    rows: dict[str, dict[str, object]] = {}
    for each in found:
        name = str(each["site"])
        pattern = LAYER.sub(".{}", name, count=1)
        layers.setdefault(pattern, []).extend(LAYER.findall(name)[:1])
        rows.setdefault(pattern, {"axes": " ".join(points[name].dims), "": "on demand" if each["on_demand"] else ""})
    show_table([{"site": pattern.replace("{}", _range(layers[pattern])), **row} for pattern, row in rows.items()])
    say(f"{len(points)} sites; a short name with a layer means one of them: ('z', 0), ('resid_post', -1)")
    return {"model": model, "sites": found}


def _range(layers: list[str]) -> str:
    """`{0-3}` of layers in a row, else `{0,2}`."""
    numbers = list(map(int, layers))
    if len(numbers) == 1:
        return layers[0]
    in_a_row = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
    return f"{{{numbers[0]}-{numbers[-1]}}}" if in_a_row else f"{{{','.join(layers)}}}"
