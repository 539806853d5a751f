"""Linear attention with decays (Katharopoulos et al. 2020, arXiv:2006.16236; Dao and Gu 2024, arXiv:2405.21060).

`S[pos] = exp(rate) S[pos - 1] + v k^T` and `S[pos] q` in each head, step by step and in chunks of positions. `v` is
[batch, pos, head, d_head], `q` and `k` are [batch, pos, group, d_state] and shared by the heads of a group; the `rates`, the
logarithms of the decays, are [batch, pos, head].
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.ssm.scan import edited_scan, linear_scan, read_states
from hooked_lm.hooks import HookPoint

CHUNK = 64  # positions whose pairs are computed as a masked product

PerHead = Float[Tensor, "batch pos ssm_head d_ssm_head"]
PerGroup = Float[Tensor, "batch pos group d_state"]
Rates = Float[Tensor, "batch pos ssm_head"]
State = Float[Tensor, "batch ssm_head d_ssm_head d_state"]
States = Float[Tensor, "batch pos ssm_head d_ssm_head d_state"]


def hooked_decayed_sum(
    point: HookPoint, q: PerGroup, k: PerGroup, v: PerHead, rates: Rates, start: State | None
) -> tuple[PerHead, State]:
    """The outputs and the last state. All states pass a hook point, whose edits change later ones; see `scan.hooked_states`."""
    return read_states(
        point,
        v.shape[1],
        lambda edits: edited_scan(*decayed_updates(k, v, rates), start, edits),
        lambda states: read_by_queries(states, q),
        lambda: in_chunks(q, k, v, rates, start),
    )


def decayed_updates(k: PerGroup, v: PerHead, rates: Rates) -> tuple[Tensor, Tensor]:
    """Decay [batch pos head 1 1] and update of the state at each position."""
    per_head = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    return rates.exp()[..., None, None], v[..., None] * per_head[..., None, :]


def read_by_queries(states: States, q: PerGroup) -> PerHead:
    """`S q` at every position."""
    grouped = states.unflatten(2, (q.shape[2], -1)).flatten(3, 4)  # [batch pos group (head d_head) d_state]
    return (grouped @ q[..., None]).reshape(states.shape[:-1])


def in_chunks(q: PerGroup, k: PerGroup, v: PerHead, rates: Rates, start: State | None) -> tuple[PerHead, State]:
    """The outputs and the last state, from masked products within chunks and a recurrence of states between chunks.

    Only the last state of each chunk is computed.
    """
    n_pos, n_groups = v.shape[1], q.shape[2]
    length = min(CHUNK, n_pos)
    n_padded = -n_pos % length  # a rate and a value of zero do not change the state
    q, k, v, rates = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, n_padded)) for t in (q, k, v, rates))
    sizes = {"pos": length, "group": n_groups}
    rates = rearrange(rates, "batch (chunk pos) (group head) -> batch chunk group head pos", **sizes)
    v = rearrange(v, "batch (chunk pos) (group head) d_head -> batch chunk group head pos d_head", **sizes)
    q, k = (rearrange(t, "batch (chunk pos) group d_state -> batch chunk group 1 pos d_state", **sizes) for t in (q, k))

    weights = decays(rates)  # [... pos, source pos]: the decay from the source to pos
    outputs = (q @ k.mT * weights) @ v
    updates = (v * weights[..., -1, :, None]).mT @ k  # of the state, over a whole chunk
    since_start = rates.cumsum(-1).exp()
    first = torch.zeros_like(updates[:, 0]) if start is None else start.unflatten(1, (n_groups, -1))
    states = linear_scan(since_start[..., -1, None, None], updates, first)
    previous = torch.cat([first[:, None], states[:, :-1]], 1)
    outputs = outputs + since_start[..., None] * (q @ previous.mT)
    outputs = rearrange(outputs, "batch chunk group head pos d_head -> batch (chunk pos) (group head) d_head")
    return outputs[:, :n_pos], states[:, -1].flatten(1, 2)


def decays(rates: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos source_pos"]:
    """`exp(sum of the rates after the source, up to pos)`; zero for sources after pos."""
    return log_decays(rates).exp()


def log_decays(rates: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos source_pos"]:
    """The sum of the rates after the source, up to pos; minus infinity for sources after pos.

    Each sum is computed directly: a difference of cumulative sums would lose precision.
    """
    length = rates.shape[-1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=rates.device).tril(-1)
    sums = torch.where(earlier, rates[..., None], 0.0).cumsum(-2)
    return torch.where(earlier.logical_not().triu(1), float("-inf"), sums)
