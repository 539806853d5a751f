"""Multi-query attention whose keys are its values, with a low-rank output, as in DeepSeek-V4 (DeepSeek-AI 2026)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.indexer import rotate_last
from hooked_lm.components.attention.latent import LatentInputs, normalised_latent
from hooked_lm.components.attention.multihead import KEY, QUERY, Keys, PerHead, SelfAttention, Stream, Values, project
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import RMSNorm, norm_unhooked
from hooked_lm.hooks import HookPoint, is_listening

Z = Float[Tensor, "batch pos head d_head"]
OutLatent = Float[Tensor, "batch pos group d_o_latent"]


class AbstractTiedKVAttention(SelfAttention, ABC):
    """Attention to keys that are values, with a low-rank output; a kind says which keys its queries attend to."""

    mixes_linearly = False
    keys_are_values = True  # an edit of a key is one of a value
    axes = {
        "W_DQ": "[d_model] d_q_latent",
        "W_UQ": "head [d_q_latent] d_head",
        "W_DO": "[head/n_groups d_head] d_o_latent; each group of heads has outputs of its own",
        "W_UO": "[group d_o_latent] d_model; it is multiplied by groups",
    }

    key_value_parts: tuple[str, ...] = ("hook_k", "k_norm", "hook_rot_k", "hook_v", "W_K")

    def __init__(self, cfg: "TiedKVAttention.Config") -> None:
        super().__init__()
        if cfg.n_heads % cfg.n_groups or cfg.n_kv != 1:
            raise ValueError(f"{cfg.n_heads} heads cannot form {cfg.n_groups} groups, or do not share one key")
        self.cfg, of_latent = cfg, ("batch", "pos", "d_q_latent")
        self.W_DQ = nn.Parameter(torch.empty(cfg.d_model, cfg.d_q_latent))
        self.hook_q_latent = HookPoint(*of_latent)
        self.q_norm = RMSNorm.Config(cfg.d_q_latent, cfg.eps).build(of_latent)
        self.W_UQ = projection(cfg.n_heads, cfg.d_q_latent, cfg.d_head)
        self.hook_q = HookPoint(*QUERY)
        self.q_head_norm = RMSNorm.Config(cfg.d_head, cfg.eps, weight=False).build(QUERY)
        self.hook_rot_q = HookPoint(*QUERY)
        self.W_K = projection(1, cfg.d_model, cfg.d_head)
        self.hook_k = HookPoint(*KEY)
        self.k_norm = RMSNorm.Config(cfg.d_head, cfg.eps).build(KEY)
        self.hook_rot_k, self.hook_v = HookPoint(*KEY), HookPoint(*KEY)
        self.make_mixing(cfg.d_head)
        del self.W_O
        self.W_DO = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_o_latent))
        self.W_UO = nn.Parameter(torch.empty(cfg.n_groups, cfg.d_o_latent, cfg.d_model))
        self.hook_rot_z, self.hook_o_latent = HookPoint(*QUERY), HookPoint("batch", "pos", "group", "d_o_latent")
        for name in ("hook_z", "hook_o_latent", "hook_result"):  # sites are listed in the order of computation
            self._modules[name] = self._modules.pop(name)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """Each input is the normalised stream, or one copy of it per head; the last two default to the one before."""
        context = context or Context(query_input.shape[1], query_input.device)
        key_input = query_input if key_input is None else key_input
        down = F.linear(query_input, self.W_DQ.T)
        q_latent = normalised_latent(down, self.hook_q_latent, self.q_norm)
        angles = context.query_angles(self.cfg.rotary)
        q = self.q_head_norm(self.hook_q(project(q_latent, self.W_UQ, None)))
        q = self.hook_rot_q(rotate_last(self.cfg.rotary, q, angles))
        k = self.k_norm(self.hook_k(project(key_input, self.W_K, None)))
        k = v = self.hook_rot_k(rotate_last(self.cfg.rotary, k, context.key_angles(self.cfg.rotary)))
        if value_input is not None and value_input is not key_input:
            v = norm_unhooked(self.k_norm, project(value_input, self.W_K, None))
            v = rotate_last(self.cfg.rotary, v, context.key_angles(self.cfg.rotary))
        inputs = LatentInputs(query_input, q_latent, key_input)
        rot_z = self.hook_rot_z(self.attend(q, k, self.hook_v(v), inputs, context, layer))
        cos, sin = angles
        return self.output(self.hook_z(rotate_last(self.cfg.rotary, rot_z, (cos, -sin))))

    @abstractmethod
    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Z:
        """The mixed values, for the queries, keys and values of the new tokens."""

    def output(self, z: Z) -> Stream:
        """The output of mixed values into the stream; head by head only if something listens."""
        cfg, n = self.cfg, self.cfg.n_heads // self.cfg.n_groups
        if not (is_listening(self.hook_result) or (self.settings.attn_result and not self.settings.fused)):
            return torch.einsum("bpgr,grm->bpm", self.hook_o_latent(self.o_latent(z)), self.W_UO)
        parts = torch.einsum("bpnh,nhr->bpnr", z, self.W_DO).unflatten(2, (cfg.n_groups, n))
        latent = parts.sum(3)
        parts = parts + ((self.hook_o_latent(latent) - latent) / n)[:, :, :, None]  # an edit is of all heads of a group
        return self.hook_result(torch.einsum("bpgnr,grm->bpgnm", parts, self.W_UO).flatten(2, 3)).sum(2)

    def o_latent(self, z: Z) -> OutLatent:
        """The sum of what the heads of each group write."""
        of_groups = z.unflatten(2, (self.cfg.n_groups, -1)).flatten(3)
        return torch.einsum("bpgx,gxr->bpgr", of_groups, self.W_DO.unflatten(0, (self.cfg.n_groups, -1)).flatten(1, 2))

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:  # type: ignore[override]
        """What each head writes for `z`, computed at each call: its part of `W_DO` times the `W_UO` of its group."""
        return self.W_DO @ self.W_UO.repeat_interleave(self.cfg.n_heads // self.cfg.n_groups, 0)


class TiedKVAttention(AbstractTiedKVAttention):
    """Attention of all heads to one key per token, `norm(x W_K)`, which is also its value.

    Queries are `norm(norm(x W_DQ) W_UQ)`, where the norm of each head, `q_head_norm`, has no weight. Rotary applies to the last
    features of queries and keys, hence also to values: `hook_rot_z` are the mixed values, `hook_z` these after the rotation by
    the position of the query is undone, so that a value counts by its distance. `hook_v` is `hook_rot_k`, unless one is edited.

    The output is `sum over the heads of a group of z W_DO`, `hook_o_latent`, times `W_UO`, summed over groups. `W_DO` is
    [head, d_head, d_o_latent], `W_UO` [group, d_o_latent, d_model]. `W_O` is their product.
    """

    @dataclass(frozen=True)
    class Config(SelfAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        d_q_latent: int
        d_o_latent: int
        n_groups: int
        rotary: Rotary
        eps: float = 1e-6
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        n_key_value_heads: int | None = 1
        window: int | None = None  # how many positions back a query attends to, itself included
        sinks: bool = True

        def build(self) -> AbstractTiedKVAttention:
            return TiedKVAttention(self)

    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Z:
        """The mixed values, for the queries, keys and values of the new tokens."""
        k, v = context.update_kv(layer, k, v)
        return context.attend_rows(layer, self.kernel(), q, k, v)
