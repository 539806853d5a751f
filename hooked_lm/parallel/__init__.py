"""One model on several devices: heads, neurons and experts are split over the processes of `torch.distributed`."""

from hooked_lm.keywords import answer_keywords
from hooked_lm.parallel.points import local, local_values
from hooked_lm.parallel.split import full_state_dict, tensor_parallel

__all__ = ["full_state_dict", "local", "local_values", "tensor_parallel"]

answer_keywords(__name__)
