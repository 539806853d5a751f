"""How much an object holds, found without its help."""

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

NOT_ITS_OWN = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)


def held_bytes(root: object) -> int:
    """Bytes of all tensors that an object keeps alive, each storage once: the garbage collector's references are followed."""
    storages: dict[int, int] = {}
    seen, queue = set(), [root]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, NOT_ITS_OWN):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        queue.extend(gc.get_referents(one))
    return sum(storages.values())
