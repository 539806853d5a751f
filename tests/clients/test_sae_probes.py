"""sae-probes: activations at the ends of texts, which its own calls of the model's tokenizer cut and pad, and probes of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.clients import sae_probes_run
from tests.clients.sae_probes_run import SITES, everything
from tests.close import assert_close


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same calls on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("theirs") / "found.safetensors"
    subprocess.run([sys.executable, sae_probes_run.__file__, str(original), str(out)], check=True, capture_output=True)
    found: dict[str, Tensor] = load_file(out)
    return found


def test_as_with_the_original(theirs: dict[str, Tensor]) -> None:
    found = everything()
    assert found.keys() == theirs.keys() == {*SITES, "probe"}
    for site in SITES:
        assert_close(found[site], theirs[site], msg=site)
        assert found[site].std(0).max() > 0.1
    assert (found["probe"] - theirs["probe"]).abs().max() <= 0.05  # of 20 texts: one may change sides by rounding
