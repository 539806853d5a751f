"""Forward passes of models that read images need no values of tensors: sizes are known from shapes.

So they can be compiled as one graph, and run on tensors without values.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.core import IMAGES, thinned
from tests.families import dual_encoders, vision_encoders, vision_languages
from tests.families._case import Case
from tests.families._vision import VisionCase, hooked_any, hooked_tower, is_pair, pair_inputs, scenes, written

# The other families read how large images are from a tensor: `image_grid_thw` (Qwen), `image_sizes` (Pixtral, Mistral 3 and
# LLaVA-NeXT), or which images are empty from their pixels (Idefics3, SmolVLM).
OF_ONE_SIZE = (
    *("vit", "dinov2", "dinov2_with_registers", "clip_vision_model", "siglip_vision_model", "internvl_vision"),
    *("clip", "siglip", "metaclip_2", "llava", "gemma3", "paligemma", "internvl"),
)
ALL = [*vision_encoders.CASES, *dual_encoders.CASES, *vision_languages.CASES]
CASES = {case.family: case for case in ALL if case.family in OF_ONE_SIZE and case.name != "pixtral-tower"}


def inputs(case: Case) -> dict[str, torch.Tensor]:
    if isinstance(case, VisionCase):
        return {name: x for name, x in written(case, scenes(case)["two"]).items() if name != "attention_mask"}
    return pair_inputs(case) if is_pair(case) else hooked_tower(case).drawn_images(3, seed=1)


@torch.no_grad()
@pytest.mark.parametrize("family", thinned(OF_ONE_SIZE, keep=IMAGES))
def test_a_forward_runs_without_values(family: str):
    case, mode = CASES[family], FakeTensorMode(allow_non_fake_inputs=True)
    model, given = hooked_any(case), inputs(case)
    with mode:
        found = model(**{name: mode.from_tensor(x) for name, x in given.items()})
    assert found.shape == model(**given).shape


COMPILE = """
import torch
from tests.close import assert_close
from hooked_lm import HookedVisionEncoder, HookedVisionLanguage
tower = dict(n_layers=1, d_model=8, n_heads=2, image_size=8, patch_size=4, act_fn="relu")
sizes = dict(n_layers=1, d_model=8, n_heads=2, n_ctx=9, d_vocab=7, act_fn="relu", seed=0)
images, tokens = torch.randn(2, 3, 8, 8), torch.tensor([[1, 6, 6, 6, 6, 2]] * 2)
for model, given in (
    (HookedVisionEncoder({**tower, "seed": 0}), {}),
    (HookedVisionLanguage({**sizes, "vision": tower, "image_token": 6}), {"input_ids": tokens}),
):
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(pixel_values=images, **given), model(pixel_values=images, **given))
print("compiled")
"""


@pytest.mark.slow
def test_a_forward_compiles_into_one_graph():
    """In a separate process, because the runtime checks of annotations, which only tests have, do not compile."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr
