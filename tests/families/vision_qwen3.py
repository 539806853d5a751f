"""Qwen3-VL, Qwen3.5 and both with experts: learned positions besides rotary ones, features of several depths, hybrid decoders."""

from tests.families._case import Case
from tests.families._vision import VisionCase
from tests.families.composites import SPARSE, axes
from tests.families.delta_nets import EXPERTS, LINEAR, SHORT_LAYERS, stir
from tests.families.vision_qwen2 import AUTO, TEXT, whole, writer

WIDE = {**TEXT, **axes(4, 2, 2, mrope_interleaved=True), "head_dim": 16}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
SMALL = {**TOWER, "depth": 2, "in_channels": 1, "temporal_patch_size": 1, "num_position_embeddings": 16}
PLAIN, PLAIN_SMALL = ({name: x for name, x in each.items() if "deep" not in name} for each in (TOWER, SMALL))
PARTIAL = axes(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
HYBRID = {**WIDE, **LINEAR, **PARTIAL, **SHORT_LAYERS}
MOE = {**WIDE, **SPARSE}
HYBRID_MOE = {name: value for name, value in {**HYBRID, **EXPERTS}.items() if name != "intermediate_size"}

# fmt: off
CASES = [
    VisionCase("qwen3_vl", "two-depths", whole(WIDE, TOWER), auto=AUTO, writer=writer(4, (6, 10), (4, 6))),
    VisionCase("qwen3_vl", "tied-biased-one-depth-gelu-grid-of-the-image", whole({**WIDE, **axes(2, 3, 3,
               rope_theta=30.0), "attention_bias": True}, {**SMALL, "deepstack_visual_indexes": [1],
               "hidden_act": "gelu", "num_heads": 2}, tied=True), auto=AUTO, writer=writer(4, (4, 4), (2, 6),
               n_channels=1, n_frames=1)),
    VisionCase("qwen3_vl", "no-depths-merging-three-one-kv", whole({**WIDE, "num_key_value_heads": 1}, {**TOWER,
               "deepstack_visual_indexes": [], "spatial_merge_size": 3, "patch_size": 3, "depth": 2}), auto=AUTO,
               writer=writer(3, (3, 9), (6, 6), merge=3)),
    VisionCase("qwen3_vl_moe", "two-depths", whole(MOE, TOWER), auto=AUTO, writer=writer(4, (6, 4), (4, 8))),
    VisionCase("qwen3_5", "one-key-head-gelu-merging-three", whole({**HYBRID, "linear_num_key_heads": 1,
               "hidden_act": "gelu"}, {**PLAIN, "spatial_merge_size": 3, "patch_size": 3, "depth": 2}), auto=AUTO,
               adjust=stir, writer=writer(3, (3, 9), (6, 6), merge=3)),
    VisionCase("qwen3_5_moe", "experts", whole(HYBRID_MOE, PLAIN), auto=AUTO, adjust=stir, writer=writer(4, (6, 4), (4,
               8))),
]
# fmt: on

# fmt: off
TOWERS = [
    Case("qwen3_vl_vision", "two-depths", {**TOWER, "out_hidden_size": 20}, auto="AutoModel"),
    Case("qwen3_vl_vision", "last-depth-gelu", {**SMALL, "deepstack_visual_indexes": [1], "hidden_act": "gelu"},
         auto="AutoModel"),
    Case("qwen3_vl_vision", "no-depths",  {**SMALL, "deepstack_visual_indexes": []}, auto="AutoModel"),
    Case("qwen3_vl_moe_vision", "one-depth", {**SMALL, "deepstack_visual_indexes": [0]}, auto="AutoModel"),
    Case("qwen3_5_vision", "merging-three", {**PLAIN_SMALL, "spatial_merge_size": 3}, auto="AutoModel"),
    Case("qwen3_5_moe_vision", "four-heads", PLAIN, auto="AutoModel"),
]
# fmt: on
