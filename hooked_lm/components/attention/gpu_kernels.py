"""What the fused kernels of a GPU take: other calls fall back to one that stores all scores, and is slower.

`scaled_dot_product_attention` chooses between two kernels (as of PyTorch 2.13). The flash kernel takes half precision, grouped
heads, and heads up to 256 wide, but no mask. The memory-efficient one takes any mask and dtype, but no grouped heads, and only
widths that are multiples of 16 bytes. It aligns masks itself, and makes booleans into numbers of the queries' dtype, which biases
here have.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

FLASH_WIDTH = 256
FLASH_CAPABILITY = (8, 0)  # Ampere

Tensors = tuple[
    Float[Tensor, "batch pos head d_head"],
    Float[Tensor, "batch key_pos kernel_head d_head"],
    Float[Tensor, "batch key_pos kernel_head d_value"],
]


def for_kernels(
    q: Float[Tensor, "batch pos head d_q"],
    k: Float[Tensor, "batch key_pos kv_head d_q"],
    v: Float[Tensor, "batch key_pos kv_head d_v"],
    mask: Tensor | None,
) -> Tensors:
    """Queries, keys and values in a form that a fused kernel takes: heads may be copied, and zeros added to their width.

    The result is the same, but for columns after the values' width.
    """
    if takes_flash(q, mask):  # which pads widths that are no multiples of 8 itself, but needs equal ones
        return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    unit = 16 // q.element_size()
    q, k, v = (x if x.shape[-1] % unit == 0 else F.pad(x, (0, -x.shape[-1] % unit)) for x in (q, k, v))
    return q, k, v


def takes_flash(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the flash kernel takes queries with this mask."""
    if mask is not None or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > FLASH_WIDTH:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY
