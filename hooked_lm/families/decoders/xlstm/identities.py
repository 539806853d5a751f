"""Identities of the matrix LSTM."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
    norm_identity,
    output_from_sites,
)
from hooked_lm.families.decoders.xlstm.mlstm import MLSTM


@identities.register
def _(mixer: MLSTM, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def projected(name: str) -> tuple[Tensor, Tensor]:
        return mixer.projected(get_input(), name), at(f"hook_{name.lower()}")

    def gate(name: str) -> tuple[Tensor, Tensor]:
        return mixer.capped(get_input(), name), at(f"hook_{name}")

    def by_steps() -> tuple[Tensor, Tensor]:
        """With the state divided by exp(m), in double precision, where a difference of large terms is exact."""
        q, k, v, i, f = (at(f"hook_{name}").double() for name in "qkvif")
        q, log_f = q * mixer.cfg.d_state**-0.5, F.logsigmoid(f)
        C, n, m, out = (
            torch.zeros_like(v[:, 0, ..., None] * k[:, 0, :, None]),
            torch.zeros_like(k[:, 0]),
            0 * i[:, 0],
            [],
        )
        for pos in range(k.shape[1]):
            largest = torch.maximum(log_f[:, pos] + m, i[:, pos])
            keep, write = ((x - largest).exp()[..., None] for x in (log_f[:, pos] + m, i[:, pos]))
            C = keep[..., None] * C + (write * v[:, pos])[..., None] * k[:, pos, :, None]
            n, m = keep * n + write * k[:, pos], largest
            divisor = torch.maximum((n * q[:, pos]).sum(-1).abs(), (-m).exp()) + mixer.cfg.denominator_eps
            out.append((C @ q[:, pos, ..., None])[..., 0] / divisor[..., None])
        return torch.stack(out, 1).to(at("hook_z")), at("hook_z")

    for name in ("Q", "K", "V", "gate"):
        yield f"stream -> {name.lower()}", partial(projected, name)
    for name in ("i", "f"):
        yield f"cap(stream -> {name}) == {name}", partial(gate, name)
    yield "the stabilised recurrence of q, k, v, i, f == z", by_steps
    yield from norm_identity(mixer, "norm", at, lambda: at("hook_z"))


@output_from_sites.register
def _(mixer: MLSTM, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.written(mixer.norm.apply_weights(at("norm.hook_normalized")), at("hook_gate"))
