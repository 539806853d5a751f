"""One case of the table at a time, and its checkpoint: for modules whose tests every case in their `EACH_CASE` passes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hooked_lm import pretrained
from hooked_lm.hub.hf_checkpoint import rename_tensors
from tests.families import Case, reference
from tests.families._models import renamed, save_shuffled
from tests.unchecked import unchecked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests are ordered by case, and a worker of pytest-xdist takes whole cases, so that each model is built once."""
    if "case" in metafunc.fixturenames and (cases := getattr(metafunc.module, "EACH_CASE", None)) is not None:
        rows = [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(str(case))) for case in cases]
        metafunc.parametrize("case", rows, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's checkpoint on disk; nobody changes it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    reference(case).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint by their names on disk."""
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def weights(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the checkpoint by the names that are written today."""
    return dict(rename_tensors(tensors, renamed(case.family)))


@pytest.fixture(scope="module")
def read(
    checkpoint: Path,
    tensors: dict[str, Tensor],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Our model of the checkpoint, read from several files with the tensors in no order; nobody changes it."""
    folder = tmp_path_factory.mktemp("shuffled")
    save_shuffled(tensors, checkpoint, folder)
    with unchecked():
        return getattr(request.module, "READER", pretrained).from_pretrained_no_processing(folder)
