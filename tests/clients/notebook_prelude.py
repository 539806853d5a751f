# Runs first in the kernel of each notebook, where `prepare` is then called.
import importlib.util
import os
import random
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub
import numpy
import plotly.graph_objects as graph
import plotly.io
import torch
from IPython import get_ipython


def seed(info):
    """The same random numbers in a cell, whichever package runs, and others in each cell."""
    count = get_ipython().execution_count
    torch.manual_seed(count)
    random.seed(count)
    numpy.random.seed(count)  # noqa: NPY002


def list_repo_files(self, repo_id, **options):
    """The files of a repository in the cache."""
    snapshots = Path(os.environ["HF_HUB_CACHE"]) / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    return sorted(
        str(path.relative_to(top)) for top in snapshots.iterdir() for path in top.rglob("*") if path.is_file()
    )


def load_dataset(*names, split=None, streaming=False, **options):
    """A data set of some texts, each in the columns that public corpora have."""
    import datasets

    texts = [
        f"{first} and {second} went to the shops, and {first} gave a drink to {second}. " * 40
        for first in ("Mary", "Tom")
        for second in ("John", "James")
    ]
    found = datasets.Dataset.from_dict({"text": texts * 8, "meta": [{}] * 32})
    return found if split else datasets.DatasetDict({"train": found})


class Plots(types.ModuleType):
    """Instead of neel_plotly: each function draws the numbers that it is given as one line."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "plot":
            return self
        if name == "melt":
            return melted

        def draw(*values, return_fig=False, **named):
            figure = graph.Figure(
                [graph.Scatter(y=numbers(value)) for value in (*values, *map(named.get, "xy")) if value is not None]
            )
            return figure if return_fig else figure.show()

        return draw


def numbers(value):
    """The numbers of a tensor, or of a list of tensors, in one row; words as they are."""
    if isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple, torch.Tensor)) for part in value):
        return numpy.concatenate([numbers(part) for part in value])
    return numpy.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value).ravel()


def melted(tensor):
    """A table with a row for each number: its place along each axis, and its value."""
    import pandas

    array = numpy.asarray(tensor.detach().cpu())
    places = {str(axis): place.ravel() for axis, place in enumerate(numpy.indices(array.shape))}
    return pandas.DataFrame(places | {"value": array.ravel()})


def prepare(original, stand_ins):
    """TransformerLens in the directory `original`, or this package for "", with the outside world replaced.

    Parameters:
        stand_ins: packages that do nothing where they are not installed.
    """
    if original:
        sys.path.insert(0, original)
    else:
        from hooked_lm import compat

        compat.install(shadow=True)
    plotly.io.renderers.default = "json"
    get_ipython().events.register("pre_run_cell", seed)
    huggingface_hub.HfApi.list_repo_files = list_repo_files
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.load_dataset = load_dataset
    for package in stand_ins:
        if importlib.util.find_spec(package) is None:
            stand_in = Plots(package) if package == "neel_plotly" else MagicMock()
            sys.modules |= {package: stand_in, f"{package}.plot": stand_in}
