"""The verbs of HookedRootModule on a network that nobody rewrote, its modules named as PyTorch names them."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from hooked_lm.hooks.module import HookedRootModule
from hooked_lm.hooks.point import HookPoint


class WrappedModule(HookedRootModule):
    """Any module with a hook point at the output of each of its submodules; see `wrap`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.setup()

    def setup(self) -> None:
        """Put a point at the output of every submodule; call it again after replacing one."""
        for handle in self.__dict__.get("_taps", ()):
            handle.remove()
        self.mod_dict = dict(self.module.named_modules())
        self.hook_dict, self._taps = {}, []
        for name, module in self.mod_dict.items():
            if name:
                point = self.hook_dict[name] = HookPoint()
                point.name = name
                self._taps.append(module.register_forward_hook(partial(_tap, point)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Take the points out again; returns the module as it was."""
        for handle in self._taps:
            handle.remove()
        self.hook_dict, self._taps = {}, []
        return self.module


def wrap(module: nn.Module) -> WrappedModule:
    """Give any module `run_with_cache`, `run_with_hooks` and `hooks`; its dotted module names are the sites.

    A point shows the output of its module; of a tuple or list, the first tensor.

    >>> import torch
    >>> net = wrap(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
    >>> output, cache = net.run_with_cache(torch.ones(2, 3))
    >>> list(cache)
    ['0', '1']
    """
    return WrappedModule(module)


def _tap(point: HookPoint, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of PyTorch that sends the output through a point; a partial of it copies and pickles."""
    if isinstance(output, Tensor):
        return _through(point, output)
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        rest = (_through(point, output[0]), *output[1:])
        return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)
    return None


def _through(point: HookPoint, value: Tensor) -> Tensor:
    """What the point makes of a value; a copy if somebody saw it, as the next module may work in place."""
    return point(value).clone() if point.is_listening else value
