"""DINOv2, with and without registers."""

from tests.families._case import Case
from tests.families._vision import TOWER

DINO = {**{name: size for name, size in TOWER.items() if name != "intermediate_size"}, "mlp_ratio": 2, "num_labels": 5}
REGISTERS = {**DINO, "num_register_tokens": 3}

# fmt: off
CASES = [
    Case("dinov2", "classifier-unbiased", {**DINO, "qkv_bias": False}, auto="AutoModelForImageClassification"),
    Case("dinov2_with_registers", "classifier-gated-small-patches", {**REGISTERS, "use_swiglu_ffn": True,
         "patch_size": 4, "num_register_tokens": 1}, auto="AutoModelForImageClassification"),
]
# fmt: on
