"""The processes that share a model, and the collective operations between them, each with its gradient.

A value is *replicated* if every rank has the same tensor, and then every rank has its whole gradient. `enter` and `add_up` are
each other's transpose, and so are `gather` and `own_part`; so gradients of gradients are right, too.
"""

from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Ranks:
    """The processes of a group: `rank` is the number of this one, `size` is how many there are."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "tensor_parallel runs in the processes of torch.distributed: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group that was given to tensor_parallel")

    def slice_of(self, n: int) -> slice:
        """This rank's part of an axis of length `n`."""
        part = n // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    # ---- values ------------------------------------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """A replicated value as the input of what each rank computes a part of; its gradient is the sum over ranks."""
        return _Enter.apply(x, self)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over ranks, replicated."""
        return _AddUp.apply(x, self)

    def gather(self, x: Tensor, axis: int) -> Tensor:
        """The parts of all ranks along an axis, replicated."""
        return _Gather.apply(x, axis, self)

    def own_part(self, x: Tensor, axis: int) -> Tensor:
        """This rank's part of a replicated value along an axis."""
        return _OwnPart.apply(x, axis, self)

    # ---- values without gradients ------------------------------------------------------------------------------------

    @torch.no_grad()
    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, as a new tensor."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """The parts of all ranks along an axis, as a new tensor."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, axis)

    @torch.no_grad()
    def broadcast(self, x: Tensor, owner: int, shape: torch.Size) -> Tensor:
        """The tensor of the rank `owner`, which has this shape."""
        x = x.detach().contiguous() if self.rank == owner else x.new_empty(shape)
        source = owner if self.group is None else dist.get_global_rank(self.group, owner)
        dist.broadcast(x, source, group=self.group)
        return x

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"a model that is split over {self.size} ranks cannot be copied; split a copy of the whole model"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a model that is split over {self.size} ranks cannot be pickled; parallel.full_state_dict(model) has its weights"
        )


if TYPE_CHECKING:  # autograd passes an object of another class, with these attributes

    class _Context(FunctionCtx):
        """What the forward pass of an operation keeps for its gradient."""

        ranks: Ranks
        axis: int
        saved_tensors: tuple[Tensor, ...]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "_Context", x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor, None]:
        return _AddUp.apply(gradients[0], ctx.ranks), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "_Context", x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.summed(x)

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(gradients[0], ctx.ranks), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "_Context", x: Tensor, axis: int, ranks: Ranks) -> Tensor:
        ctx.axis, ctx.ranks = axis, ranks
        return ranks.gathered(x, axis)

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _OwnPart.apply(gradients[0], ctx.axis, ctx.ranks), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "_Context", x: Tensor, axis: int, ranks: Ranks) -> Tensor:
        ctx.axis, ctx.ranks = axis, ranks
        part = ranks.slice_of(x.shape[axis])
        return x.narrow(axis, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(gradients[0], ctx.axis, ctx.ranks), None, None


class _Joined(torch.autograd.Function):
    """The first value, in a graph that reaches the others also where it does not depend on them."""

    @staticmethod
    def forward(ctx: "_Context", x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


def joined(x: Tensor, *others: Tensor) -> Tensor:
    """The first value, in a graph that reaches the others on every rank, so that all ranks take part in their gradients."""
    return _Joined.apply(x, *others)
