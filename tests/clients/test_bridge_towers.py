"""Sites of towers and projectors under the names that TransformerBridge 4.3 has for them: the same values, or refused by name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionLanguage
from hooked_lm.hooks.select import UnknownSite
from tests.close import assert_close
from tests.families import reference
from tests.families._vision import hooked_vlm, scenes, written
from tests.families.vision_languages import CASES

PROGRAM = Path(__file__).parent / "towers_of_4.py"
FOLDER = Path(sys.prefix) / "transformer-lens-4.3.0"
FAMILIES = {case.family: case for case in CASES if case.family in ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl")}
OFFLINE = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor | None]]:
    folder = tmp_path_factory.mktemp("towers")
    for family, case in FAMILIES.items():
        reference(case).save_pretrained(folder / family)
        inputs = written(case, scenes(case)["one"])
        torch.save({**inputs, **case.writer.more(inputs["input_ids"])}, folder / family / "inputs.pt")
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(FOLDER), str(folder)]
    done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {family: torch.load(folder / family / "sites.pt") for family in FAMILIES}


def rows(value: Tensor, n: int) -> Tensor:
    """The values of `n` positions in the order of their first features: Qwen's are in windows there, row by row here."""
    vectors = value.reshape(n, -1)
    return vectors[vectors[:, 0].argsort()]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_name_means_the_same_value(theirs: dict[str, dict[str, Tensor | None]], family: str):
    """`hook_attn_scores` of theirs has the pattern."""
    case, expected = FAMILIES[family], theirs[family]
    model = hooked_vlm(case)
    known = {name: model.aliases[name] for name in expected if name in model.aliases}
    _, cache = model.run_with_cache(**written(case, scenes(case)["one"]), names_filter=[*{*known.values()}])
    compared = 0
    for name, ours in known.items():
        value = expected[name]
        if value is not None and not name.endswith("hook_attn_scores"):
            n = value.shape[:2].numel() if value.ndim > 2 else len(value)
            assert_close(rows(cache[ours], n), rows(value, n), msg=lambda text, name=name: f"{name}: {text}")
            compared += 1
    assert compared > 15 * len(model.vision.blocks)
    refused(model, {name for name, value in expected.items() if value is not None} - known.keys())


def refused(model: HookedVisionLanguage, names: set[str]) -> None:
    """All of these are refused with a site of ours that the model has."""
    assert any("qkv" in name or ".q.hook_in" in name for name in names)
    for name in names:
        with pytest.raises(UnknownSite, match=f"'{re.escape(name)}' is no site here: see vision") as refusal:
            model.run_with_cache(torch.ones(1, 1, dtype=torch.long), names_filter=name)
        assert re.search(r"see (vision[\w.]*)", str(refusal.value))[1] in model.all_points()
