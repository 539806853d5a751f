"""The circuit track of MIB: curves of faithfulness over the share of edges, by EAP-IG's code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.clients import mib_run
from tests.clients.mib_run import RUNS, everything
from tests.close import GRADIENT, assert_close

pytestmark = pytest.mark.filterwarnings("ignore:transformer-lens 3.9.0 is installed")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same calls on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("theirs") / "found.safetensors"
    subprocess.run([sys.executable, mib_run.__file__, str(original), str(out)], check=True, capture_output=True)
    found: dict[str, Tensor] = load_file(out)
    return found


def test_as_with_the_original(theirs: dict[str, Tensor]) -> None:
    found = everything()
    assert len(found) == len(theirs) == 2 * len(RUNS)
    for name, value in found.items():
        assert_close(value, theirs[name], depth=GRADIENT, msg=name)
    curves = torch.stack([value for name, value in found.items() if name.endswith("curve")])
    assert_close(curves[:, -1, 0], torch.ones(len(curves)))
    assert (curves[:, 1:, 1] >= curves[:, :-1, 1]).all()
