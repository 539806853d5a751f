"""A model that is split over two processes equals the whole one: see `worker.py`, which both processes run once."""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from hooked_lm import HookedTransformer
from hooked_lm.parallel import local, tensor_parallel
from tests.parallel import worker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tensor parallel")]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed on each rank."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    torch.multiprocessing.spawn(worker.run, (str(folder),), nprocs=worker.WORLD)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(worker.WORLD)]


@pytest.mark.parametrize(
    ("model", "check"),
    [
        (model, check)
        for model in worker.MODELS
        for check in worker.CHECKS
        if model == "gpt2" or check not in worker.ONCE
    ],
)
def test_a_split_model_equals_the_whole_one(failures: list[dict[str, str]], model: str, check: str) -> None:
    assert [found.get(f"{model} {check}") for found in failures] == [None] * worker.WORLD


def test_splitting_needs_processes() -> None:
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        tensor_parallel(HookedTransformer({**worker.SIZES, "act_fn": "gelu", "device": "cpu"}))


def test_a_local_hook_keeps_the_attributes_of_its_object() -> None:
    class Seeing:
        hook_point, direction = "blocks.0.attn.hook_z", "bwd"

        def __call__(self, value: torch.Tensor, hook: object) -> None:
            self.seen = value

    hook = local(Seeing())
    assert (hook.hook_point, hook.direction, hook.local, hasattr(hook, "layer")) == (
        "blocks.0.attn.hook_z",
        "bwd",
        True,
        False,
    )
    model = HookedTransformer({**worker.SIZES, "act_fn": "gelu", "device": "cpu"})
    with model.hooks([hook]):
        model(torch.tensor([[1, 2]]), return_type="loss").backward()
    assert hook.seen.shape == (1, 2, 4, 4)
