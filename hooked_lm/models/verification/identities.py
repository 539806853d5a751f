"""The identities between the sites of a decoder, an encoder and an encoder-decoder."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.components import verification
from hooked_lm.components.embeddings.embed import Unembed, soft_capped
from hooked_lm.components.embeddings.encoder_embed import ConcatenatedEncoderEmbed, EncoderEmbed
from hooked_lm.components.embeddings.transformed_unembed import TransformedUnembed
from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler, TokenClassifier
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.components.streams import MergedRMSNorm
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, norm_identity, norm_output, within
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.stack import Stack
from hooked_lm.models.vision.tower import TowerParts

# ---- a stack ---------------------------------------------------------------------------------------------------------


def stack_identities(model: nn.Module, stack: Stack, at: Sites, *given: LazyTensor | None) -> Iterator[Identity]:
    """Identities within each block, between consecutive blocks (resid_post == next resid_pre), and of the final norm.

    `given` are the inputs of all blocks besides the stream. If a model has several stacks, names start with the stack's.
    """
    stacks: Sequence[Stack] = model.stacks  # type: ignore[assignment]  # models and towers have some
    blocks, prefix = stack.blocks_of(model), f"{stack.blocks}: " if len(stacks) > 1 else ""
    for layer, block in enumerate(blocks):
        for name, pair in verification.identities(block, within(at, f"{stack.blocks}.{layer}"), *given):
            yield prefix + name, pair
        if layer + 1 < len(blocks):

            def both(layer: int = layer) -> tuple[Tensor, Tensor]:
                return at(stack.site_after(model, layer)), at(f"{stack.blocks}.{layer + 1}.hook_resid_pre")

            yield f"{prefix}resid_post == next resid_pre", both
            for further in getattr(block, "further_streams", ()):

                def streams(layer: int = layer, further: str = further) -> tuple[Tensor, Tensor]:
                    after = at(f"{stack.blocks}.{layer}.hook_{further}_post")
                    return after, at(f"{stack.blocks}.{layer + 1}.hook_{further}_pre")

                yield f"{prefix}{further}_post == next {further}_pre", streams
    if isinstance(final := norm_of(model, stack.ln_final), MergedRMSNorm):

        def merged() -> tuple[Tensor, Tensor]:
            return final.merged(at(f"{stack.blocks}.{len(blocks) - 1}.hook_streams_post")), at(
                f"{stack.ln_final}.hook_in"
            )

        yield f"{prefix}merged(streams_post) == {stack.ln_final}.in", merged
    yield from norm_identity(model, stack.ln_final, at, _before_final_norm(model, stack, at))


def stack_output(model: nn.Module, stack: Stack, at: Sites) -> Tensor:
    """The output of a stack's final norm, computed from the sites."""
    return norm_output(model, stack.ln_final, at, _before_final_norm(model, stack, at))


def _before_final_norm(model: nn.Module, stack: Stack, at: Sites) -> LazyTensor:
    """The stream after the last block."""
    last = stack.site_after(model, len(stack.blocks_of(model)) - 1)
    return lambda: at(last)


# ---- decoders --------------------------------------------------------------------------------------------------------


def decoder_identities(
    model: HookedRootModule, at: Sites, logits: Tensor, tokens: Int[Tensor, "batch pos"]
) -> Iterator[Identity]:
    """Identities of a decoder: of the stack, the per-layer embeddings and the logits."""
    yield from stack_identities(
        model, model.stack, at, (lambda: at("hook_pos_embed")) if model.tree.shortformer else None
    )
    if model.tree.per_layer is not None:
        yield from verification.identities(model.per_layer, within(at, "per_layer"), lambda: at("hook_embed"), tokens)
        for layer in (i for i, block in enumerate(model.blocks) if "hook_per_layer_in" in block._modules):

            def given(layer: int = layer) -> tuple[Tensor, Tensor]:
                return at("per_layer.hook_out")[:, :, layer], at(f"blocks.{layer}.hook_per_layer_in")

            yield "per_layer.out == per_layer_in of each layer", given

    for site in model.all_points():
        if site.endswith("hook_shortcut_out"):
            end = int(site.split(".")[1])
            made = f"blocks.{end - 1}.shortcut.hook_out"
            yield "shortcut.out == shortcut_out of the next layer", lambda made=made, site=site: (at(made), at(site))  # type: ignore[misc]

    def normalized() -> Tensor:
        return stack_output(model, model.stack, at).to(logits.dtype)  # the stream may have a wider dtype

    def predicted() -> tuple[Tensor, Tensor]:
        return model.cap_logits(model.unembed.unhooked(normalized())), logits

    if isinstance(model.unembed, TransformedUnembed):
        within_head = within(at, "unembed.transform")
        for name, pair in verification.identities(model.unembed.transform, within_head, normalized):
            yield f"unembed.transform: {name}", pair
    yield "unembed(ln_final(resid_post)) == logits", predicted


# ---- encoder-decoders ------------------------------------------------------------------------------------------------


def encoder_decoder_identities(model: HookedRootModule, at: Sites, logits: Tensor) -> Iterator[Identity]:
    """Identities of an encoder-decoder: of both stacks, the encoder's output and the logits."""

    def source() -> Tensor:
        return at("hook_encoder_out")

    def predicted() -> tuple[Tensor, Tensor]:
        out = stack_output(model, model.decoder_stack, at)
        return soft_capped(model.unembed.unhooked(out), model.tree.unembed.soft_cap), logits

    yield from stack_identities(model, model.encoder_stack, at)
    yield (
        "encoder_final_ln(resid_post) == encoder_out",
        lambda: (stack_output(model, model.encoder_stack, at), source()),
    )
    yield from stack_identities(model, model.decoder_stack, at, source)
    yield "unembed(decoder_final_ln(resid_post)) == logits", predicted


# ---- encoders --------------------------------------------------------------------------------------------------------


def encoder_identities(model: HookedRootModule, at: Sites, output: Tensor) -> Iterator[Identity]:
    """Identities of an encoder: of the embeddings, the stack and the heads."""
    if isinstance(model.embed, EncoderEmbed):
        yield from embed_identities(model, at)
    yield "full_embed == resid_pre", lambda: (at("hook_full_embed"), at("blocks.0.hook_resid_pre"))
    yield from stack_identities(model, model.stack, at)
    yield from head_identities(model, at, lambda: stack_output(model, model.stack, at), output)


def embed_identities(model: HookedRootModule, at: Sites) -> Iterator[Identity]:
    """Identities of the embeddings: their sum, normalised, is the input of the stream."""
    names = ("hook_embed", "hook_token_type_embed", "hook_extra_embed", "hook_pos_embed")
    parts = [name for name in names if f"embed.{name}" in model.hook_dict]
    if isinstance(model.embed, ConcatenatedEncoderEmbed):
        yield (
            "concat @ W_map + b == embed",
            lambda: (model.embed.mapped(at("embed.hook_concat")), at("embed.hook_embed")),
        )

    def total() -> Tensor:
        return sum((at(f"embed.{name}") for name in parts[1:]), at(f"embed.{parts[0]}"))

    def full() -> tuple[Tensor, Tensor]:
        normalized = norm_output(model.embed, "ln", within(at, "embed"), total)
        return model.embed.into_stream(normalized), at("hook_full_embed")

    if verification.is_known(model.embed.embed):
        yield from verification.identities(model.embed.embed, within(at, "embed.embed"), lambda: at("embed.hook_embed"))
    yield from norm_identity(model.embed, "ln", within(at, "embed"), total, label="embed.ln")
    yield "sum of embeddings, normed == full_embed", full


def head_identities(model: HookedRootModule, at: Sites, stream: LazyTensor, output: Tensor) -> Iterator[Identity]:
    """Identities of the heads; a head that was replaced by a foreign module has none."""

    def pooled() -> Tensor:
        return at("pooler.hook_pooler_out")

    kinds: dict[str, Any] = {"mlm_head": MLMHead, "pooler": Pooler, "nsp_head": NSPHead}
    kinds |= {"classifier": Classifier, "token_classifier": TokenClassifier}
    for name, kind in kinds.items():
        head, get_input = getattr(model, name), pooled if name in ("nsp_head", "classifier") else stream
        if isinstance(head, kind):
            yield from (
                (f"{name}: {identity}", pair)
                for identity, pair in verification.identities(head, within(at, name), get_input)
            )
    if isinstance(model.unembed, Unembed):

        def unembedded(x: Tensor) -> Tensor:
            return soft_capped(model.unembed.unhooked(x), model.tree.unembed.soft_cap)

        def logits() -> tuple[Tensor, Tensor]:
            if model.mlm_head is None:
                return unembedded(stream()), output
            if isinstance(model.mlm_head, MLMHead):
                return unembedded(verification.output_from_sites(model.mlm_head, within(at, "mlm_head"))), output
            return unembedded(model.mlm_head(stream())), output

        yield "unembed(mlm_head) == logits", logits
    if model.main_head is None:
        yield "ln_final(resid_post) == embeddings", lambda: (stream(), output)


# ---- vision towers ---------------------------------------------------------------------------------------------------


def tower_identities(tower: TowerParts, at: Sites) -> Iterator[Identity]:
    """Identities of a vision tower: of its embeddings, the stack and the heads."""

    def total() -> Tensor:
        embed = tower.embed.with_class_tokens(at("hook_patch_embed"))
        return embed if "pos_embed" not in tower._modules else embed + at("hook_pos_embed")

    yield from norm_identity(tower, "ln_pre", at, total)
    yield (
        "sum of embeddings, normed == resid_pre",
        lambda: (norm_output(tower, "ln_pre", at, total), at("blocks.0.hook_resid_pre")),
    )
    yield from stack_identities(tower, tower.stack, at)

    def stream() -> Tensor:
        return stack_output(tower, tower.stack, at)

    inputs: dict[str, LazyTensor] = {"pooler": stream, "projection": lambda: at("pooler.hook_pooler_out")}
    for name, get_input in {**inputs, "classifier": inputs["projection"], "merger": stream}.items():
        if getattr(tower, name) is not None:
            for identity, pair in verification.identities(getattr(tower, name), within(at, name), get_input):
                yield f"{name}: {identity}", pair


def vision_identities(model: TowerParts, at: Sites, output: Tensor) -> Iterator[Identity]:
    """Identities of a vision encoder: of the tower and its output."""
    yield from tower_identities(model, at)
    if model.pooler is None and model.merger is None:
        yield "ln_final(resid_post) == embeddings", lambda: (stack_output(model, model.stack, at), output)


# ---- vision-language models ------------------------------------------------------------------------------------------


def vision_language_identities(
    model: HookedRootModule, at: Sites, logits: Tensor, tokens: Int[Tensor, "batch pos"]
) -> Iterator[Identity]:
    """Identities of a vision-language model: of the tower, of the images' tokens and of the decoder."""
    for name, pair in tower_identities(model.vision, within(at, "vision")):
        yield f"vision: {name}", pair
    for name, pair in verification.identities(
        model.projector, within(at, "projector"), lambda: at("projector.hook_in")
    ):
        yield f"projector: {name}", pair
    is_image = (tokens == model.tree.image_token)[..., None]

    def merged() -> tuple[Tensor, Tensor]:
        text, both = at("hook_embed"), at("hook_embed_merged")
        return both.masked_fill(is_image, 0.0), text.masked_fill(is_image, 0.0)

    yield "embed_merged == embed of text", merged
    if int(is_image.sum()) == at("hook_image_features").shape[:2].numel():  # else some of them are padding
        of_images = {"hook_embed_merged": "hook_image_features"}
        of_images |= {
            f"blocks.{i}.hook_deepstack": f"projector.deepstack.{i}.hook_out" for i in deepstack_layers(model)
        }
        for site, made in of_images.items():

            def at_images(site: str = site, made: str = made) -> tuple[Tensor, Tensor]:
                return at(made).flatten(0, 1), at(site)[is_image[..., 0]]

            yield f"{made.split('.')[-1]} of images == {site.split('.')[-1]} at their tokens", at_images
    for i in deepstack_layers(model):
        yield "deepstack == 0 at text", lambda i=i: (at(f"blocks.{i}.hook_deepstack") * ~is_image, at("hook_embed") * 0)  # type: ignore[misc]
    yield from decoder_identities(model, at, logits, tokens)


def deepstack_layers(model: HookedRootModule) -> list[int]:
    """The layers of a decoder after which features of images are added."""
    return [i for i, block in enumerate(model.blocks) if "hook_deepstack" in block._modules]
