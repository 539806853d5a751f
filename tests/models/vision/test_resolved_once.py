"""Images are resolved once for each run: pixels are checked and cut into patches, which the tower reads."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import VisionInputs, patching
from hooked_lm.components.vision.pixel_format import PixelFormat
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.prompts import values_of
from hooked_lm.interventions import ZeroAblate
from hooked_lm.models.vision.inputs import TowerInputs
from tests.families._vision import VisionCase, hooked_pair, hooked_tower, hooked_vlm, pair_inputs, scenes, written
from tests.families.dual_encoders import CASES as PAIRS
from tests.families.vision_encoders import CASES as TOWERS
from tests.families.vision_languages import CASES
from tests.models.vision.test_toy import IMAGE, pixels, toy

MODEL = toy()
PROMPT = torch.tensor([[1, *[IMAGE] * 4, 2, 3], [1, 2, *[IMAGE] * 4, 3]])
GIVEN, ROWS = {"pixel_values": pixels(2)}, VisionInputs(PROMPT, {"pixel_values": pixels(2)})
OTHERS = VisionInputs(PROMPT, {"pixel_values": pixels(3)[1:]})
RULED: VisionCase = next(case for case in CASES if case.family == "qwen3_vl")  # positions and streams depend on images


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 7]


def resumed() -> Any:
    model, inputs = hooked_vlm(RULED), written(RULED, scenes(RULED)["one"])
    tokens = inputs.pop("input_ids")
    images = {name: inputs[name] for name in model.image_arguments if name in inputs}
    return model(torch.zeros(*tokens.shape, model.cfg.d_model), start_at_layer=1, tokens=tokens, **images)


def pair_of_rows() -> Any:
    inputs = pair_inputs(PAIRS[0])
    return hooked_pair(PAIRS[0])(VisionInputs(inputs.pop("input_ids"), inputs))


def cells(*sites: Any) -> Any:
    """The values at sites of two runs, those of one with some changed in turn."""
    edits = [[patching.Edit(site, torch.zeros(()), (pos,))] for site in sites for pos in (1, 3)]
    return list(Experiment(MODEL, ROWS, [metric]).run(edits, progress=False))


def swept(site: str) -> Any:
    return patching.sweep(MODEL, ROWS, OTHERS, metric=metric, sites=site, layers=[0], positions=[1, 3], progress=False)


RUNS: dict[str, Callable[[], Any]] = {
    "forward": lambda: MODEL(PROMPT, **GIVEN),
    "forward of rows": lambda: MODEL(ROWS),
    "run_with_cache": lambda: MODEL.run_with_cache(ROWS),
    "run_with_hooks": lambda: MODEL.run_with_hooks(ROWS, fwd_hooks=[ZeroAblate("vision.z", 0, heads=[0])]),
    "start_at_layer": resumed,
    "a tower": lambda: hooked_tower(TOWERS[0])(**hooked_tower(TOWERS[0]).drawn_images()),
    "a pair": lambda: hooked_pair(PAIRS[0])(**pair_inputs(PAIRS[0])),
    "a pair of rows": pair_of_rows,
    "image_features": lambda: MODEL.image_features(GIVEN),
    "image_positions": lambda: MODEL.image_positions(ROWS),
    "generate": lambda: MODEL.generate(PROMPT, 3, stop_at_eos=False, verbose=False, **GIVEN),
    "generate without a cache": lambda: MODEL.generate(
        ROWS, 3, stop_at_eos=False, use_past_kv_cache=False, verbose=False
    ),
    "generate_stream": lambda: list(MODEL.generate_stream(ROWS, 3, stop_at_eos=False)),
    "values of a run": lambda: values_of(MODEL, ROWS, ["blocks.0.hook_resid_pre"]),
    "cells": lambda: cells("blocks.0.hook_resid_pre", "blocks.1.hook_mlp_out"),
    "cells in the tower": lambda: cells("vision.blocks.0.hook_mlp_out", "vision.hook_patch_embed", "hook_embed"),
    "cells as whole runs": lambda: cells("blocks.0.attn.hook_pattern"),
}


@pytest.fixture
def resolutions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often images were checked and how often cut, by any format; text alone has none."""
    found: Counter[str] = Counter()
    models = (MODEL, hooked_vlm(RULED), hooked_pair(PAIRS[0]))
    formats = {type(hooked_tower(TOWERS[0]).tree.pixels), *(type(model.tree.vision.pixels) for model in models)}

    def count(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def counted(self: PixelFormat, embed: Any, *args: Any, **images: Any) -> Any:
            found[name] += bool(images) or args != ({},)
            return function(self, embed, *args, **images)

        monkeypatch.setattr(owner, name, counted)

    count(PixelFormat, "ready")
    for each in formats:
        count(each, "patches")
    return found


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", RUNS)
def test_images_are_resolved_once(name: str, resolutions: Counter[str]) -> None:
    RUNS[name]()
    assert resolutions == {"ready": 1, "patches": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("site", "n_runs"), [("resid_pre", 3), ("vision.resid_pre", 4)])
def test_a_sweep_resolves_the_images_of_each_of_its_runs(site: str, n_runs: int, resolutions: Counter[str]) -> None:
    """The values of the clean run, the base run of all cells, and the baseline; before them a grid of patches asks the tower."""
    swept(site)
    assert resolutions == {"ready": n_runs, "patches": n_runs}


def test_images_in_the_tower_are_neither_chosen_nor_replaced() -> None:
    patches = TowerInputs(MODEL.vision.resolved(GIVEN).patches)
    inputs = VisionInputs(PROMPT, patches)
    assert torch.equal(MODEL(inputs), MODEL(ROWS))
    assert torch.equal(MODEL(inputs.repeated(2))[2:], MODEL(ROWS.repeated(2))[2:])
    assert inputs.to("cpu").images is patches
    assert "patches tensor [2, 4, 48]" in repr(inputs)
    with pytest.raises(ValueError, match="in the tower already: leave out pixel_values"):
        MODEL(inputs, pixel_values=pixels(2))
    with pytest.raises(TypeError, match="in the tower already: choose among rows before a run"):
        MODEL.rows(inputs, [0])
