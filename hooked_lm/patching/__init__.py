"""Causal experiments: activation patching, path patching, ablation, attention knockout and causal tracing."""

from hooked_lm.engine.edit import Edit, Rewrite
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.study import Study, SweepInterrupted
from hooked_lm.keywords import answer_keywords
from hooked_lm.patching.ablation import ablate
from hooked_lm.patching.classic import (
    Sweep,
    generic_activation_patch,
    get_act_patch_attn_head_all_pos_every,
    get_act_patch_attn_head_by_pos_every,
    get_act_patch_attn_head_k_all_pos,
    get_act_patch_attn_head_k_by_pos,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_attn_head_out_by_pos,
    get_act_patch_attn_head_pattern_all_pos,
    get_act_patch_attn_head_pattern_by_pos,
    get_act_patch_attn_head_pattern_dest_src_pos,
    get_act_patch_attn_head_q_all_pos,
    get_act_patch_attn_head_q_by_pos,
    get_act_patch_attn_head_v_all_pos,
    get_act_patch_attn_head_v_by_pos,
    get_act_patch_attn_out,
    get_act_patch_block_every,
    get_act_patch_mlp_out,
    get_act_patch_resid_mid,
    get_act_patch_resid_pre,
    make_df_from_ranges,
)
from hooked_lm.patching.knockout import attention_knockout
from hooked_lm.patching.paths import head_to_head, path_patch
from hooked_lm.patching.run_each import run_each
from hooked_lm.patching.setters import (
    PATCH_SETTERS,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)
from hooked_lm.patching.sweeps import sweep
from hooked_lm.patching.tracing import causal_trace

__all__ = [
    "PATCH_SETTERS",
    "Edit",
    "Experiment",
    "Rewrite",
    "Study",
    "Sweep",
    "SweepInterrupted",
    "SweepResult",
    "ablate",
    "attention_knockout",
    "causal_trace",
    "generic_activation_patch",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "head_to_head",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "make_df_from_ranges",
    "path_patch",
    "run_each",
    "sweep",
]

answer_keywords(__name__)
