"""Memory of GPUs."""

from hooked_lm.compat.devices import print_gpu_mem
