"""The identities between the sites of a dual encoder."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components import verification
from hooked_lm.components.verification.registry import Identity, Sites, within
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.verification.identities import stack_identities, stack_output, tower_identities
from hooked_lm.models.vision.text_tower import TextTower


def dual_encoder_identities(
    model: HookedRootModule, at: Sites, logits: Tensor, tokens: Int[Tensor, "text pos"]
) -> Iterator[Identity]:
    """Identities of both towers, of their vectors and of the similarity."""
    for name, pair in tower_identities(model.vision, within(at, "vision")):
        yield f"vision: {name}", pair
    for name, pair in text_identities(model.text, within(at, "text"), tokens):
        yield f"text: {name}", pair
    for side in ("image", "text"):

        def lengthened(side: str = side) -> tuple[Tensor, Tensor]:
            features = at(model.aliases[f"hook_{side}_features"])
            return at(f"hook_{side}_embeds") * features.norm(dim=-1, keepdim=True), features

        yield f"{side}_embeds * length == {side}_features", lengthened
    yield (
        "similarity(image_embeds, text_embeds) == logits_per_image",
        lambda: (model.similarity(at("hook_image_embeds"), at("hook_text_embeds")), at("hook_logits_per_image")),
    )
    yield "logits_per_image == output", lambda: (at("hook_logits_per_image"), logits)


def text_identities(tower: TextTower, at: Sites, tokens: Int[Tensor, "text pos"]) -> Iterator[Identity]:
    """Identities of a text tower: of its embeddings, the stack, and the vector of a text."""
    yield (
        "embed + pos_embed == resid_pre",
        lambda: (
            at("hook_embed") + at("hook_pos_embed"),
            at("blocks.0.hook_resid_pre"),
        ),
    )
    yield from stack_identities(tower, tower.stack, at)

    def stream() -> Tensor:
        return stack_output(tower, tower.stack, at)

    def pooled() -> Tensor:
        return at("pooler.hook_pooler_out")

    for name, pair in verification.identities(tower.pooler, within(at, "pooler"), stream, tokens):
        yield f"pooler: {name}", pair
    for name, pair in verification.identities(tower.projection, within(at, "projection"), pooled):
        yield f"projection: {name}", pair
