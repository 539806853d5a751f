"""Devices; in 2.x also those of `multi_gpu`."""

from hooked_lm.compat.devices import (
    AvailableDeviceMemory,
    ModelWithCfg,
    calculate_available_device_cuda_memory,
    determine_available_memory_for_available_devices,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device_for_block_index,
    move_to_and_update_config,
    sort_devices_based_on_available_memory,
    warn_if_mps,
)
from hooked_lm.utils import get_device
