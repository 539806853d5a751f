"""Hyper-connections between several residual streams."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.blocks.hyper import HyperBlock, HyperConnection, mixed, weighted_sum, written
from hooked_lm.components.blocks.wiring import Wiring, attn_step, mlp_step
from hooked_lm.components.verification.blocks import weights_of, wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    identities,
    weights_after_norms,
    within,
)


def _connection_identities(block: HyperBlock, part: str, streams: str, at: Sites) -> Iterator[Identity]:
    """Identities of what a sublayer reads from the streams at a site."""
    connection, of_connection = getattr(block, part), within(at, part)
    for name in ("read", "write") if connection.cfg.mix is None else ("read", "write", "mix"):

        def weights(name: str = name) -> tuple[Tensor, Tensor]:
            return getattr(connection, name)(at(f"hook_{streams}")), of_connection(f"hook_{name}")

        yield f"{part}: gate of {streams} == {name}", weights
    yield (
        f"{part}: sum of read * {streams} == out",
        lambda: (weighted_sum(at(f"hook_{streams}"), of_connection("hook_read")), of_connection("hook_out")),
    )


def _written_identity(block: HyperBlock, part: str, out: str, before: str, after: str, at: Sites) -> Identity:
    connection: HyperConnection = getattr(block, part)

    def pair() -> tuple[Tensor, Tensor]:
        kept = (
            at(f"hook_{before}") if connection.cfg.mix is None else mixed(at(f"hook_{before}"), at(f"{part}.hook_mix"))
        )
        return written(kept, at(f"hook_{out}"), at(f"{part}.hook_write")), at(f"hook_{after}")

    return f"{before}{'' if connection.cfg.mix is None else ', mixed,'} + write * {out} == {after}", pair


def _sublayers(block: HyperBlock) -> Wiring:
    """What the sublayers do with the sums of streams that they read."""
    return Wiring((attn_step(block, "attn_hc.hook_out"), mlp_step(block, "mlp_hc.hook_out")))


@identities.register
def _(block: HyperBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for place in ("pre", "mid", "post"):

        def means(place: str = place) -> tuple[Tensor, Tensor]:
            return at(f"hook_streams_{place}").mean(2), at(f"hook_resid_{place}")

        yield f"mean of streams_{place} == resid_{place}", means
    if block.cfg.first:
        yield (
            "streams_pre are copies",
            lambda: (at("hook_streams_pre")[:, :, :1].expand_as(at("hook_streams_pre")), at("hook_streams_pre")),
        )
    yield from wired_identities(block, at, _sublayers(block), shift)
    for part, out, before, after in (("attn_hc", "attn_out", "pre", "mid"), ("mlp_hc", "mlp_out", "mid", "post")):
        yield from _connection_identities(block, part, f"streams_{before}", at)
        yield _written_identity(block, part, out, f"streams_{before}", f"streams_{after}", at)


@weights_after_norms.register
def _(block: HyperBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the streams and weights, with the weights after it."""
    return weights_of(block, _sublayers(block))
