"""Several devices."""

from hooked_lm.compat.devices import (
    MIXED_CPU_GPU_ERROR,
    AvailableDeviceMemory,
    MaxMemory,
    calculate_available_device_cuda_memory,
    cast_floating_params_to_dtype,
    count_unique_devices,
    determine_available_memory_for_available_devices,
    find_embedding_device,
    find_misplaced_modules,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device_for_block_index,
    is_mixed_cpu_gpu,
    maybe_cast_floating_params,
    resolve_device_map,
    sort_devices_based_on_available_memory,
)
