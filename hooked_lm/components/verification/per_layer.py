"""Per-layer inputs: embeddings, copies of the embedding and token ids, and the gates of per-layer embeddings."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.blocks.per_layer import PerLayerEmbed, PerLayerGate
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
    norm_identity,
    norm_output,
    output_from_sites,
)


@identities.register
def _(module: PerLayerEmbed, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens, with the embedding `embed()`."""

    def projected() -> Tensor:
        return module.projected(embed())

    yield from norm_identity(module, "norm", at, projected, label="per_layer.norm")
    yield (
        "(normalized * w + W_E[token]) / sqrt(2) == per_layer.out",
        lambda: ((norm_output(module, "norm", at, projected) + module.rows(tokens)) * 2**-0.5, at("hook_out")),
    )


@identities.register
def _(gate: PerLayerGate, at: Sites, get_input: LazyTensor, embedded: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with inputs `get_input()` and `embedded()`."""
    yield "x W_gate == pre", lambda: (get_input() @ gate.W_gate, at("hook_pre"))
    yield "act(pre) * per_layer_in == post", lambda: (gate.act(at("hook_pre")) * embedded(), at("hook_post"))


@output_from_sites.register
def _(gate: PerLayerGate, at: Sites) -> Tensor:
    """The output, from the input of `W_out`."""
    return at("hook_post") @ gate.W_out
