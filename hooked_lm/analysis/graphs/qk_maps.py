"""The map from the stream to the queries or keys of a layer, with the scales of its norms held fixed: affine steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.latent import AbstractLatentAttention, times
from hooked_lm.components.attention.multihead import AbstractAttention, Attention, ProjectedAttention
from hooked_lm.components.attention.position_scale import ScaledQueries
from hooked_lm.components.blocks.wiring import sublayer_of
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.layer_norm import JointLayerNorm, LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of, upcast
from hooked_lm.components.norms.scales import ChannelScale
from hooked_lm.hooks import Slice
from hooked_lm.models.decoder import Decoder

Sources = Float[Tensor, "source batch pos *features"]
Heads = Float[Tensor, "source batch pos head d_head"]
Angles = tuple[Float[Tensor, "#batch pos 1 width"], Float[Tensor, "#batch pos 1 width"]]  # as Rotary.rotate takes them


DIVIDING = (RMSNorm.forward, LayerNorm.forward, JointLayerNorm.forward)  # of norms that are linear for a fixed scale


class Affine(NamedTuple):
    """A step `linear(x) + constant` of sources [source, batch, pos, ...]; the constant, by this label, is a source of its own."""

    linear: Callable[[Sources], Sources]
    label: str = ""
    constant: Tensor | None = None  # broadcasts with [batch, pos, ...]


@dataclass(frozen=True)
class Side:
    """The queries or keys, `name` "q" or "k", of a layer in a run, at some positions.

    Args:
        cache: the sites of the run that `sites` names.
        context: that of the run, with its rotary angles.
        positions: a slice that keeps the axis of positions.
    """

    model: Decoder
    cache: Mapping[Any, Tensor]
    context: Context
    layer: int
    name: str
    positions: Slice

    @property
    def source_layer(self) -> int:
        """The layer whose attention makes them: an earlier one for keys that are shared."""
        attn = self.model.blocks[self.layer].attn
        return attn.kv_source_layer if self.name == "k" and not attn.computes_kv else self.layer

    @property
    def attn(self) -> Any:
        """The attention that makes them."""
        return self.model.blocks[self.source_layer].attn

    @property
    def path(self) -> str:
        return f"blocks.{self.source_layer}"

    @property
    def reads(self) -> str:
        """The value of the stream that they are made from."""
        return sublayer_of(self.model.blocks[self.source_layer], "attn").reads

    def steps(self) -> list[Affine]:
        """The steps from the stream to what the scores are products of, without their scale."""
        block = self.model.blocks[self.source_layer]
        step = sublayer_of(block, "attn")
        if step.beside or step.part != "attn":
            raise refusal(self.layer, self.attn, "reads more than the stream")
        found = self.norm(step.norm, norm_of(block, step.norm), -2) if step.norm else []
        if self.context.pos_embed is not None:
            shift = self.positions.apply(self.context.pos_embed, -2)
            found.append(Affine(same, "pos_embed", shift))
        return [*found, *projection_steps(self.attn, self)]

    def norm(self, name: str, norm: nn.Module, axis: int) -> list[Affine]:
        """The step of a norm, whose positions are on this axis; none for an identity. Raises ValueError for one that divides
        by something else than a scale at its site."""
        if isinstance(norm, nn.Identity):
            return []
        is_known = isinstance(norm, ChannelScale) or type(norm).forward in DIVIDING
        if not is_known or not isinstance(norm, (LayerNorm, RMSNorm, ChannelScale)):
            raise refusal(
                self.layer,
                self.attn,
                f"is read through a {type(norm).__name__} ({name}), which does more than divide by a scale",
            )
        is_scale = isinstance(norm, ChannelScale)
        scale = None if is_scale else self.positions.apply(self.cache[f"{self.path}.{name}.hook_scale"], axis)
        gain = norm.gain()

        def linear(x: Sources) -> Sources:
            x = norm.centred(x) if isinstance(norm, LayerNorm) else x
            x = x if scale is None else x / scale.to(x.device)
            return x if gain is None else x * gain.detach().to(x)

        shift = norm.shift() if isinstance(norm, (LayerNorm, ChannelScale)) else None
        label = name.split(".")[-1] + "_bias"
        return [Affine(linear, label, None if shift is None else shift.detach())]

    def angles(self, rotary: Rotary) -> Angles:
        """The rotary angles of their positions."""
        cos, sin = (self.context.query_angles if self.name == "q" else self.context.key_angles)(rotary)
        return self.positions.apply(cos, 1), self.positions.apply(sin, 1)

    def run(
        self, sources: Mapping[str, Float[Tensor, "batch pos d_model"]]
    ) -> dict[str, Float[Tensor, "batch pos head d_head"]]:
        """What each source, and each constant on the way, is in the queries or keys; their sum is all of them."""
        labels, values = list(sources), torch.stack([upcast(source) for source in sources.values()])
        for step in self.steps():
            values = step.linear(values)
            if step.constant is None or not bool(step.constant.any()):
                continue
            constant = upcast(step.constant).to(values.device).expand(values.shape[1:])[None]
            values, labels = torch.cat([values, constant]), [*labels, step.label]
        return dict(zip(labels, values.unbind(), strict=True))

    def linear(self, sources: Float[Tensor, "source batch pos d_model"]) -> Heads:
        """The same, without the constants on the way."""
        values: Tensor = upcast(sources)
        for step in self.steps():
            values = step.linear(values)
        return values


def same(x: Sources) -> Sources:
    return x


def sites_read(model: Decoder, layer: int) -> list[str]:
    """The sites of the scales that the queries and keys of a layer are divided by."""
    attn = model.blocks[layer].attn
    layers = {layer, layer if attn.computes_kv else attn.kv_source_layer}
    return [name for name in model.all_points() if name.endswith(".hook_scale") and _layer(name) in layers]


def _layer(name: str) -> int:
    first, number, *_ = name.split(".")
    return int(number) if first == "blocks" else -1


def refusal(layer: int, attn: nn.Module, does: str) -> ValueError:
    """The error for attention whose scores are no sum over pairs of sources."""
    return ValueError(
        f"the attention of layer {layer}, a {type(attn).__name__}, {does}, so its scores are not a sum over pairs of what is "
        "written to the stream; choose a layer with plain attention"
    )


@singledispatch
def projection_steps(attn: nn.Module, side: Side) -> list[Affine]:
    """The steps from the input of attention to queries or keys. Raises ValueError for a kind that has other steps."""
    if not isinstance(attn, AbstractAttention) or attn.computes_kv:
        raise refusal(side.layer, attn, "computes its queries and keys in a way that is not known here")
    return _of_heads(attn, side)


@projection_steps.register
def _(attn: ProjectedAttention, side: Side) -> list[Affine]:
    if type(attn).forward is not Attention.forward or type(attn).adapted is not ProjectedAttention.adapted:
        raise refusal(side.layer, attn, "computes its queries and keys in a way that is not known here")
    return _of_heads(attn, side)


def _of_heads(attn: AbstractAttention, side: Side) -> list[Affine]:
    """A projection for each head, a norm, rotary and the factor of positions, those that there are."""
    name, cfg = side.name, attn.cfg
    W, b = getattr(attn, f"W_{name.upper()}").detach(), getattr(attn, f"b_{name.upper()}")
    if name == "k" and attn.n_kv != W.shape[0]:
        W, b = attn.per_query_head(W), None if b is None else attn.per_query_head(b)
    steps = [Affine(lambda x: project(x, W), f"b_{name.upper()}", None if b is None else b.detach())]
    norm = side.norm(f"attn.{name}_norm", norm_of(attn, f"{name}_norm"), -3)
    turn = [] if cfg.rotary is None else [Affine(lambda x: per_source(x, cfg.rotary.rotate, side.angles(cfg.rotary)))]
    steps += [*turn, *norm] if getattr(cfg, "rotary_first", False) else [*norm, *turn]
    return [*steps, *_position_factor(attn, side)]


def _position_factor(attn: nn.Module, side: Side) -> list[Affine]:
    """The step of queries that are multiplied by a factor of their position."""
    if side.name == "k" or not isinstance(attn, ScaledQueries):
        return []
    factors = side.positions.apply(attn.cfg.position_scale.factors(side.context), 1)
    return [Affine(lambda x: x * factors.to(x))]


@projection_steps.register
def _(attn: AbstractLatentAttention, side: Side) -> list[Affine]:
    """Through a latent, which is normalised; only some features turn with the position."""
    cfg, name = attn.cfg, side.name
    if name == "k":
        steps = _latent_keys(attn, side)
    elif cfg.d_q_latent is None:
        steps = [Affine(lambda x: project(x, attn.W_Q.detach()))]
    else:
        [norm] = side.norm("attn.q_norm", attn.q_norm, -2)
        W_UQ = attn.W_UQ.detach()
        down = Affine(lambda x: x @ attn.W_DQ.detach().to(x), "b_DQ", _detached(attn.b_DQ))
        read = Affine(lambda raw: attn.read_by_queries(times(norm.linear(raw), cfg.q_factor), raw))
        steps = [down, read, Affine(lambda x: project(x, W_UQ))]
    if cfg.rotary is not None:
        steps.append(Affine(lambda x: per_source(x, attn.rotated, side.angles(cfg.rotary))))
    return [*steps, *_position_factor(attn, side)]


def _latent_keys(attn: AbstractLatentAttention, side: Side) -> list[Affine]:
    """The latent of keys beside the features that all heads share, then both for each head."""
    cfg, W, W_UK = attn.cfg, torch.cat([attn.W_DKV, attn.W_KR], 1).detach(), attn.W_UK.detach()
    b = None if attn.b_DKV is None or attn.b_KR is None else torch.cat([attn.b_DKV, attn.b_KR]).detach()
    [norm] = side.norm("attn.kv_norm", attn.kv_norm, -2)
    of_shared = side.norm("attn.kr_norm", attn.kr_norm, -2) if cfg.kr_norm else [Affine(same)]

    def up(x: Sources) -> Heads:
        latent, shared = x.split([cfg.d_kv_latent, cfg.n_shared], -1)
        nope = project(times(norm.linear(latent), cfg.kv_factor), W_UK)
        shared = of_shared[0].linear(shared)[..., None, :]
        return torch.cat([nope, shared.expand(*nope.shape[:-1], -1)], -1)

    return [Affine(lambda x: x @ W.to(x), "b_DKV", b), Affine(up)]


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def project(x: Sources, W: Float[Tensor, "head d_in d_head"]) -> Heads:
    """The projections of sources for each head."""
    return torch.einsum("...m,nmh->...nh", x, W.to(x))


def per_source(x: Heads, function: Callable[[Tensor, Angles], Tensor], angles: Angles) -> Heads:
    """A function of [batch, pos, head, d_head] that is linear, for each source."""
    n_heads = x.shape[-2]
    beside = x.movedim(0, 2).flatten(2, 3)  # sources as further heads
    return function(beside, angles).unflatten(2, (-1, n_heads)).movedim(2, 0)
