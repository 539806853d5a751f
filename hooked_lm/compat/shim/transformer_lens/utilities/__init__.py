"""Helpers."""

from transformer_lens.utilities.activation_functions import (
    SOFTCAP_DISABLED,
    SUPPORTED_ACTIVATIONS,
    ActivationFunction,
    apply_softcap,
    gelu_fast,
    gelu_new,
    softcap_enabled,
    solu,
)
from transformer_lens.utilities.attribute_utils import get_nested_attr, set_nested_attr
from transformer_lens.utilities.components_utils import get_act_name
from transformer_lens.utilities.defaults_utils import (
    USE_DEFAULT_VALUE,
    LocallyOverridenDefaults,
    override_or_use_default_value,
)
from transformer_lens.utilities.devices import ModelWithCfg, get_device, move_to_and_update_config, warn_if_mps
from transformer_lens.utilities.exploratory_utils import test_prompt
from transformer_lens.utilities.gpu_utils import print_gpu_mem
from transformer_lens.utilities.hf_utils import (
    clear_huggingface_cache,
    download_file_from_hf,
    get_dataset,
    get_rotary_pct_from_config,
    keep_single_column,
    select_compatible_kwargs,
)
from transformer_lens.utilities.initialization_utils import (
    NonlinearityType,
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)
from transformer_lens.utilities.library_utils import is_library_available
from transformer_lens.utilities.lm_utils import lm_accuracy, lm_cross_entropy_loss
from transformer_lens.utilities.logits_utils import logits_to_df, sample_logits
from transformer_lens.utilities.matrix import composition_scores, get_matrix_corner
from transformer_lens.utilities.multi_gpu import (
    calculate_available_device_cuda_memory,
    count_unique_devices,
    determine_available_memory_for_available_devices,
    find_embedding_device,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device_for_block_index,
    resolve_device_map,
    sort_devices_based_on_available_memory,
)
from transformer_lens.utilities.parameter_swap import temporarily_swap_parameter
from transformer_lens.utilities.slice import Slice, SliceInput
from transformer_lens.utilities.tensors import (
    check_structure,
    filter_dict_by_prefix,
    get_corner,
    get_cumsum_along_dim,
    get_offset_position_ids,
    is_lower_triangular,
    is_square,
    remove_batch_dim,
    repeat_along_head_dimension,
    to_numpy,
    transpose,
)
from transformer_lens.utilities.tokenize_utils import (
    get_attention_mask,
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
    tokenize_and_concatenate,
)
from transformer_lens.utilities.typed_module_list import TypedModuleList
