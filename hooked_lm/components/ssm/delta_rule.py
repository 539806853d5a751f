"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), step by step and in chunks of positions.

`S[pos] = S' + beta (v - S' k) k^T`, where `S' = S[pos - 1] exp(g)` is the state after its decay, and the output is `S[pos] q`:
before v is written under the key k, a share beta of what the state holds under k is erased. `q`, `k` are
[batch, pos, head, d_state], `v` is [batch, pos, head, d_head], `beta` [batch, pos, head]. `g` is [batch, pos, head, 1], one
decay for each head, or [batch, pos, head, d_state], one for each column of the state.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.ssm.decayed_sum import decays
from hooked_lm.components.ssm.scan import EditedStates, StateHistory, all_states, read_states
from hooked_lm.hooks import HookPoint

State = Float[Tensor, "batch ssm_head d_ssm_head d_state"]
States = Float[Tensor, "batch pos ssm_head d_ssm_head d_state"]
Queries = Float[Tensor, "batch pos ssm_head d_state"]
Output = Float[Tensor, "batch pos ssm_head d_ssm_head"]


class DeltaInputs(NamedTuple):
    """What the rule reads at each position; without queries, what changes its state."""

    k: Float[Tensor, "batch pos ssm_head d_state"]
    v: Output
    g: Float[Tensor, "batch pos ssm_head #d_state"]
    beta: Float[Tensor, "batch pos ssm_head"]


def delta_states(inputs: DeltaInputs, start: State | None, edits: EditedStates | None = None) -> StateHistory:
    """All states after `start` (zeros if None), one position at a time; see `scan.all_states` for edits."""
    k, v, g, beta = inputs

    def step(pos: int, state: State) -> State:
        state = state * g[:, pos, :, None].exp()
        error = v[:, pos] - (state @ k[:, pos, :, :, None])[..., 0]
        return torch.addcmul(state, (beta[:, pos, :, None] * error)[..., None], k[:, pos, :, None])

    start = v.new_zeros(*v[:, 0].shape, k.shape[-1]) if start is None else start
    return all_states(step, start, k.shape[1], edits)


def hooked_delta_rule(point: HookPoint, q: Queries, inputs: DeltaInputs, start: State | None) -> tuple[Output, State]:
    """The outputs and the last state. All states pass a hook point, whose edits change later ones; see `scan.hooked_states`."""
    return read_states(
        point,
        q.shape[1],
        lambda edits: delta_states(inputs, start, edits),
        lambda states: (states @ q[..., None])[..., 0],
        lambda: delta_in_chunks(q, inputs, start),
    )


def delta_in_chunks(q: Queries, inputs: DeltaInputs, start: State | None) -> tuple[Output, State]:
    """The outputs and the last state, from products within chunks and a recurrence of states between chunks.

    In a chunk that starts from `S0`, position i writes `u_i = beta_i (v_i - S0 e_i k_i - sum over j < i of (k_i d_ij k_j) u_j)`,
    where `e_i` is the decay since the start and `d_ij` that since j: a triangular system, solved for all S0 at once.
    """
    n_pos, per_head = q.shape[1], inputs.g.shape[-1] == 1
    length = min(64 if per_head else 16, n_pos)  # decays of each column take a product for each pair of positions
    missing = -n_pos % length  # where beta and g are 0 the state does not change
    padded = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, missing)) for t in (q, *inputs[:3], inputs.beta[..., None]))
    q, k, v, g, beta = (rearrange(t, "b (chunk pos) head d -> b chunk head pos d", pos=length) for t in padded)

    if per_head:
        pairs = decays(g[..., 0])  # [... pos, source pos]
        overlap, weights, until_end = k @ k.mT * pairs, q @ k.mT * pairs, pairs[..., -1, :, None]
    else:
        pairs = decays(g.mT)  # [... d_state, pos, source pos]
        overlap, weights = (torch.einsum("...id,...jd,...dij->...ij", x, k, pairs) for x in (k, q))
        until_end = pairs[..., -1, :].mT
    since_start = g.cumsum(-2).exp()
    right = torch.cat([v, k * since_start], -1) * beta
    solved = torch.linalg.solve_triangular(overlap * beta, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    queries, last_keys, total = q * since_start, k * until_end, since_start[..., -1:, :]

    state = torch.zeros_like(v[:, 0, :, 0, :, None] * k[:, 0, :, 0, None]) if start is None else start
    outputs = []
    for chunk in range(k.shape[1]):
        written = values[:, chunk] - keys[:, chunk] @ state.mT
        outputs.append(queries[:, chunk] @ state.mT + weights[:, chunk] @ written)
        state = state * total[:, chunk] + written.mT @ last_keys[:, chunk]
    return rearrange(outputs, "chunk b head pos d -> b (chunk pos) head d")[:, :n_pos], state
