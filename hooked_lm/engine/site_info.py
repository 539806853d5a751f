"""The layer of each site of a decoder, and the positions that an edit there can affect. Unsupported sites are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.blocks.block import Block
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.edit import Edit
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder


class TokenScope(Enum):
    """The tokens whose values pass a site."""

    BEFORE_MIXING = "before attention: all tokens that the block reads"
    KEYS_AND_VALUES = "between the stream and keys or values: the tokens that others attend to"
    QUERIES_AND_AFTER = "between the stream and queries, or after attention: the tokens that leave the block"
    SCORES = "scores and patterns: the tokens of one cell at a time"
    STATE = "inside a mixer with a state: the tokens of one cell at a time"


REACHES_LATER = {
    TokenScope.BEFORE_MIXING,
    TokenScope.KEYS_AND_VALUES,
    TokenScope.STATE,
}  # an edit there affects later tokens in the same layer


@dataclass(frozen=True)
class SiteInfo:
    """The layer of a site (the number of layers, for sites after the last block) and its tokens."""

    layer: int
    scope: TokenScope
    dims: tuple[str, ...]
    ends_sublayer: bool = False  # its value is the whole output of attention or the mixer
    on_demand: bool = False  # a hook there changes how the layer computes
    entry_site: str = ""  # the site after attention whose base value suffices to compute this one, such as its own

    @property
    def is_cheap_to_read(self) -> bool:
        """Whether a hook can read the site cheaply, with all positions in one call."""
        return not self.on_demand and self.scope not in (TokenScope.SCORES, TokenScope.STATE)


def site_infos(model: Decoder) -> dict[str, SiteInfo]:
    """The SiteInfo of every supported site."""
    found: dict[str, SiteInfo] = {}
    n_layers = len(model.blocks)
    names = {id(point): name for name, point in model.all_points().items()}
    for layer, block in enumerate(model.blocks):
        entries = {id(point): names[id(there)] for point, there in _entry_points(block)}
        for point, scope in _scopes(block):
            is_output = point is sublayer_output(block)
            known = (layer, scope, point.dims, is_output, point.on_demand, entries.get(id(point), ""))
            found[names[id(point)]] = SiteInfo(*known)
    for module in (norm_of(model, "ln_final"), model.unembed):
        for point in _points(module):
            found[names[id(point)]] = SiteInfo(
                n_layers, TokenScope.QUERIES_AND_AFTER, point.dims, on_demand=point.on_demand
            )
    return {name: info for name, info in found.items() if _is_supported(info)}


def score_edits(edits: Sequence[Edit], infos: Mapping[str, SiteInfo], layer: int | None = None) -> list[Edit]:
    """The edits of scores and patterns, in a layer or in all of them. Queries there may attend to later keys."""
    found = [(edit, infos[edit.site]) for edit in edits if edit.site in infos]
    return [edit for edit, info in found if info.scope is TokenScope.SCORES and layer in (None, info.layer)]


def mixing(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that mix tokens; none for an unknown block."""
    if not isinstance(block, Block) or not isinstance(getattr(block, "attn", None), AbstractAttention | None):
        return []
    return [block._modules[name] for name in ("attn", "mixer") if name in block._modules]  # type: ignore[misc]


def in_series(block: nn.Module) -> bool:
    """Whether the mixer of a block reads what its attention makes, which is no term of the stream."""
    return len(mixing(block)) > 1 and not has_part(block, "attn")


def kv_source_layer(block: nn.Module) -> int | None:
    """The layer whose keys and values the block shares; None if it computes its own."""
    return next((module.kv_source_layer for module in mixing(block) if isinstance(module, AbstractAttention)), None)


def sublayer_output(block: nn.Module) -> nn.Module | None:
    """The point of the output of a block's attention or mixer; None if it has both, as neither is the whole output."""
    outputs = [block._modules[f"hook_{part}_out"] for part in ("attn", "mixer") if has_part(block, part)]
    return outputs[0] if len(outputs) == 1 and mixing(block) else None


def _is_supported(info: SiteInfo) -> bool:
    return info.dims[:2] == ("batch", "pos") or info.scope is TokenScope.SCORES


def _points(module: nn.Module) -> list[HookPoint]:
    return [point for point in module.modules() if isinstance(point, HookPoint)]


def _scopes(block: nn.Module) -> list[tuple[HookPoint, TokenScope]]:
    """The points of a block in the order of computation, each with its TokenScope."""
    modules = mixing(block)
    if not modules:
        mixes_nothing = isinstance(block, Block) and "attn" not in block._modules
        return [(point, TokenScope.QUERIES_AND_AFTER) for point in _points(block)] if mixes_nothing else []
    inside = {id(point): scope for module in modules for point, scope in _mixing_scopes(module)}
    attn = modules[0]
    if has_part(block, "attn"):
        of_queries = TokenScope.KEYS_AND_VALUES if attn.mixes_inputs else TokenScope.QUERIES_AND_AFTER
        inside[id(block.hook_q_input)] = of_queries
        if block.computes_kv:
            inside |= dict.fromkeys((id(block.hook_k_input), id(block.hook_v_input)), TokenScope.KEYS_AND_VALUES)
    if has_part(block, "attn") and has_part(block, "mixer"):
        inside[id(block.hook_mixer_in)] = TokenScope.BEFORE_MIXING
    if in_series(block):  # what follows attention precedes the mixer, whose state later tokens read
        points, of_mixer = _points(block), set(map(id, _points(modules[-1])))
        before = next(i for i, point in enumerate(points) if id(point) in of_mixer)
        inside |= {id(point): TokenScope.BEFORE_MIXING for point in points[:before]}
    own = {id(point) for module in modules for point in _points(module)}
    scopes, after_mixing = [], False
    for point in _points(block):
        after_mixing = after_mixing or id(point) in own
        scopes.append(
            (point, inside.get(id(point), TokenScope.QUERIES_AND_AFTER if after_mixing else TokenScope.BEFORE_MIXING))
        )
    return scopes


def _entry_points(block: nn.Module) -> list[tuple[HookPoint, HookPoint]]:
    """The points of a block that follow from `z` (up to the output of attention) or from the output of attention or a mixer,
    each with that point."""
    output = sublayer_output(block)
    if not mixing(block) or not isinstance(output, HookPoint):
        return []
    module = mixing(block)[-1]
    points = _points(block)
    last = max(points.index(point) for point in _points(module))
    stop = points.index(output)
    entries = [(point, output) for point in points[stop:]]
    if isinstance(module, AbstractAttention) and isinstance(module.hook_z, HookPoint):
        after_z = [module.hook_z, *_points(norm_of(module, "z_norm")), module.hook_result, *points[last + 1 : stop]]
        entries += [(point, module.hook_z) for point in after_z]
    return entries


def _mixing_scopes(module: nn.Module) -> list[tuple[HookPoint, TokenScope]]:
    points = [(name, point) for name, point in module.named_modules() if isinstance(point, HookPoint)]
    if not isinstance(module, AbstractAttention):
        return [(point, TokenScope.STATE) for _, point in points]

    def scope(name: str) -> TokenScope:
        if name in module.score_sites:
            return TokenScope.SCORES
        return TokenScope.KEYS_AND_VALUES if module.makes_keys(name) else TokenScope.QUERIES_AND_AFTER

    return [(point, scope(name)) for name, point in points]
