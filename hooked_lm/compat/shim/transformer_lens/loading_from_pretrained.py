"""Configs and weights of checkpoints."""

from hooked_lm.compat.loading import (
    DEFAULT_MODEL_ALIASES,
    MODEL_ALIASES,
    NEED_REMOTE_CODE_MODELS,
    NON_HF_HOSTED_MODEL_NAMES,
    OFFICIAL_MODEL_NAMES,
    PYTHIA_CHECKPOINTS,
    PYTHIA_V0_CHECKPOINTS,
    STANFORD_CRFM_CHECKPOINTS,
    Config,
    convert_hf_model_config,
    fill_missing_keys,
    get_basic_config,
    get_checkpoint_labels,
    get_num_params_of_pretrained,
    get_official_model_name,
    get_pretrained_model_config,
    get_pretrained_state_dict,
    make_model_alias_map,
)
from hooked_lm.compat.loading import convert_hf_model_config as convert_neel_model_config
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import (
    convert_apertus_weights,
    convert_bert_weights,
    convert_bloom_weights,
    convert_coder_weights,
    convert_gemma_weights,
    convert_gpt2_weights,
    convert_gpt_oss_weights,
    convert_gptj_weights,
    convert_llama_weights,
    convert_mingpt_weights,
    convert_mistral_weights,
    convert_mixtral_weights,
    convert_neel_solu_old_weights,
    convert_neo_weights,
    convert_neox_weights,
    convert_olmo2_weights,
    convert_olmo3_weights,
    convert_olmo_weights,
    convert_olmoe_weights,
    convert_opt_weights,
    convert_phi3_weights,
    convert_phi_weights,
    convert_qwen2_weights,
    convert_qwen3_weights,
    convert_t5_weights,
)
from transformer_lens.utilities import get_rotary_pct_from_config
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
