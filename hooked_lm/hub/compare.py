"""Compares a checkpoint loaded by this library with the same checkpoint loaded by transformers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.extras import quiet_torchao
from hooked_lm.hub.adapter import find_adapter, from_adapter
from hooked_lm.hub.compare_images import compared, words
from hooked_lm.hub.hf_checkpoint import HFCheckpoint, from_source
from hooked_lm.hub.hf_load import load_hf
from hooked_lm.hub.load import checked_name, load
from hooked_lm.hub.logit_factors import left_out_by_transformers, with_factors
from hooked_lm.hub.model_classes import Model, model_class
from hooked_lm.hub.options import Options, one_device
from hooked_lm.hub.source import WEIGHT_FILES, find
from hooked_lm.models.config.tree import (
    DecoderConfig,
    DualEncoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    VisionConfig,
)
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.verification.verify import Check, Verification
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.models.vision.vision_language import VisionLanguage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# name of an output in transformers -> our return type
HEADS = {
    "last_hidden_state": "embeddings",
    "pooler_output": "pooled",
    "logits": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "nsp",
    "sop_logits": "nsp",
}


@quiet_torchao()
@torch.no_grad()
def verify(
    model_name: str | os.PathLike[str],
    n_tokens: int = 24,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | int | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Verification:
    """Loads a checkpoint here and in transformers, compares the outputs, and checks the identities of the sites.

    Compares the logits and greedy tokens of decoders and encoder-decoders, and the embeddings and head outputs of encoders.
    Models that read images are compared on random images, vision-language models also on text alone. Of other composites
    the language model is compared with the composite, on text alone, and the names of these checks say so. An adapter (LoRA) is
    compared with the model that peft merges it into.
    Numbers may differ by 1e-4 of the largest (four machine epsilons in low precision). A greedy token of transformers counts
    as wrong if our logit of another token is larger by more than that.
    """
    checked_name(model_name)
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    options = Options(dtype=dtype, device=one_device(device), **where)
    source = find(model_name, WEIGHT_FILES, **options.download)
    if (folder := find_adapter(source)) is not None:
        checkpoint = from_adapter(source, folder, options)
        model, reference = load_hf(checkpoint, model_class).eval(), checkpoint.options.hf_model
    else:
        if (reader := from_source(source, options).reader_of_all) is not None:
            options = replace(options, reads_images=reader)
        checkpoint = from_source(source, options)
        model = load(model_name, options, model_class).eval()
        reference = _reference(model, checkpoint, source.folder())
    reference = reference.to(model.device).eval()
    by = _Reference(reference, checkpoint, n_tokens, max(1e-4, 4 * torch.finfo(model.cfg.dtype).eps))
    of_images = (by.check(name, *pair) for name, *pair in compared(model, reference, partial(by.complete, model)))
    return Verification((*of_images, *_on_text(model, by)))


@dataclass(frozen=True)
class _Reference:
    """The model of transformers, and how a model is compared with it."""

    module: Any
    checkpoint: HFCheckpoint
    n_tokens: int
    tolerance: float

    def check(self, name: str, value: Tensor, expected: Tensor) -> Check:
        """The check that both are equal, up to the tolerance times the largest expected number."""
        error = (value - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        return Check(name, (error.item(),), self.tolerance)

    def complete(self, model: Decoder | EncoderDecoder, logits: Tensor) -> Tensor:
        """Logits of transformers, with what the class of a composite leaves out."""
        lacking = left_out_by_transformers(self.checkpoint.whole_type, model.tree.unembed)
        return with_factors(logits, model.tree.unembed) if lacking else logits


# ---- on text ---------------------------------------------------------------------------------------------------------


@singledispatch
def _on_text(model: Model, by: _Reference) -> Iterator[Check]:
    """Yields the checks of a model on random text, and of the identities of its sites; without a text model, of these alone."""
    yield from model.verify().checks


@_on_text.register
def _(model: Decoder, by: _Reference) -> Iterator[Check]:
    tokens = _random_tokens(model)
    checks = _logits_and_greedy(model, by, tokens)
    yield from _of_a_part(checks, by) if by.checkpoint.whole is not None else checks
    yield from model.verify(tokens).checks


@_on_text.register
def _(model: VisionLanguage, by: _Reference) -> Iterator[Check]:
    def read(tokens: Tensor) -> VisionInputs:
        """Text as transformers reads it without token types: no prompt that is read in both directions."""
        return VisionInputs(tokens, is_suffix=torch.ones_like(tokens, dtype=torch.bool))

    tokens = words(model, _length(model)).to(model.device)
    banned = [model.tree.image_token]  # without an image there may be none
    yield from _of_a_part(_logits_and_greedy(model, by, tokens, read=read, banned=banned), by)
    yield from model.verify().checks


@_on_text.register
def _(model: EncoderDecoder, by: _Reference) -> Iterator[Check]:
    tokens = _without_padding(_random_tokens(model), by.checkpoint.config)
    start = {"decoder_start_token_id": model.start_id(), "forced_bos_token_id": None}
    target = tokens % model.cfg.d_vocab_out  # the decoder may have its own vocabulary
    yield from _logits_and_greedy(model, by, tokens, target, start)
    yield from model.verify(tokens).checks


@_on_text.register
def _(model: Encoder, by: _Reference) -> Iterator[Check]:
    tokens = _without_padding(_random_tokens(model), by.checkpoint.config)
    for name, value, expected in _encoder_pairs(model, by.module, tokens):
        yield by.check(f"{name} as in transformers", value, expected)
    yield from model.verify(tokens).checks


def _of_a_part(checks: Sequence[Check], by: _Reference) -> list[Check]:
    """The checks of a model whose checkpoint reads more than text."""
    what = ", of the language model alone" if by.checkpoint.whole is not None else ", on text alone"
    return [replace(check, name=check.name + what) for check in checks]


def _length(model: Model) -> int:
    return min(16, model.cfg.n_ctx - 1)


def _random_tokens(model: Model) -> Int[Tensor, "batch pos"]:
    drawn = torch.randint(model.cfg.d_vocab, (2, _length(model)), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)


# ---- classes of transformers -----------------------------------------------------------------------------------------


def _reference(model: Model, checkpoint: HFCheckpoint, folder: Path) -> Any:
    """The model of transformers in a folder; of a composite, the part that reads images and text."""
    options: dict[str, Any] = {"dtype": model.cfg.dtype, "local_files_only": True}
    class_of = None if checkpoint.whole is not None else _CLASSES.get(type(model.cfg.tree))
    if class_of is not None:
        return class_of(model, checkpoint.config).from_pretrained(folder, **options)
    # PaliGemma's other paths are bidirectional if no token type says that a text is generated
    whole = _composite_class(checkpoint).from_pretrained(folder, **options, attn_implementation="eager")
    return getattr(whole, "thinker", whole)  # the part of Qwen-Omni that writes text


def _text_part(reference: nn.Module) -> Any:
    """The model of transformers that gives the logits of text alone."""
    inner = getattr(reference, "language_model", None)
    return inner if hasattr(inner, "lm_head") else reference  # composites of this kind ask for an image


def _composite_class(checkpoint: HFCheckpoint) -> Any:
    """The class of a composite in transformers: the one that the checkpoint names, if there is such a class."""
    import transformers

    found = (getattr(transformers, name, None) for name in checkpoint.architectures)
    known = next((hf_class for hf_class in found if hf_class is not None), None)
    return known or transformers.AutoModelForMultimodalLM._model_mapping[type(checkpoint.whole or checkpoint.config)]


def _by_config(auto: str) -> Callable[[Model, Any], Any]:
    """The class that one of transformers' has for a config, whatever the checkpoint names."""

    def class_of(model: Model, config: Any) -> Any:
        import transformers

        return getattr(transformers, auto)._model_mapping[type(config)]

    return class_of


def _named_class(model: Encoder | VisionEncoder | DualEncoder, config: Any) -> Any:
    """The class that a checkpoint names; of one that names none, that of its config, with an unembedding if there is one."""
    import transformers

    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    auto = "AutoModel" if getattr(model, "unembed", None) is None else "AutoModelForMaskedLM"
    return named or _by_config(auto)(model, config)


# By the kind of a model's tree; composites are not among them.
_CLASSES: Mapping[type, Callable[[Any, Any], Any]] = {
    DecoderConfig: _by_config("AutoModelForCausalLM"), EncoderDecoderConfig: _by_config("AutoModelForSeq2SeqLM"),
    EncoderConfig: _named_class, VisionConfig: _named_class, DualEncoderConfig: _named_class,
}  # fmt: skip


# ---- outputs ---------------------------------------------------------------------------------------------------------


def _without_padding(tokens: Tensor, config: "PreTrainedConfig") -> Tensor:
    """Replaces pad token ids, as some models give padding a special position or none."""
    pad = -1 if config.pad_token_id is None else config.pad_token_id
    return torch.where(tokens == pad, (tokens + 1) % config.vocab_size, tokens)


def _encoder_pairs(model: Encoder, reference: Any, tokens: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields name, our output and that of transformers, for each output of the transformers class."""
    found = reference(tokens)
    for name, return_type in HEADS.items():
        if found.get(name) is not None:
            yield return_type, model(tokens, return_type=return_type), found[name]
    if "start_logits" in found:
        yield "logits", model(tokens), torch.stack([found.start_logits, found.end_logits], -1)


def _logits_and_greedy(
    model: Decoder | EncoderDecoder,
    by: _Reference,
    tokens: Tensor,
    target: Tensor | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    read: Callable[[Tensor], Any] = lambda tokens: tokens,
    banned: Sequence[int] = (),
) -> list[Check]:
    """Checks the logits and the greedy tokens of a decoder, or of an encoder-decoder with a `target`.

    `options` are those of generation in transformers. `read` makes the model's input of tokens; `banned` ones are not generated.
    """
    from transformers import GenerationConfig

    reference = _text_part(by.module)
    reference.generation_config = GenerationConfig(pad_token_id=0, **options)
    inputs = {} if target is None else {"decoder_input_ids": target}
    expected = by.complete(model, reference(tokens, **inputs).logits)
    largest = expected.abs().max().clamp(min=1.0)
    n_before = tokens.shape[1] if target is None else 1
    limits = {"max_new_tokens": min(by.n_tokens, model.cfg.n_ctx - n_before), "suppress_tokens": [*banned] or None}
    greedy = reference.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **limits)
    predicted = (model(read(greedy)) if target is None else model(tokens, greedy))[:, n_before - 1 : -1]
    predicted[..., [token for token in banned if token < predicted.shape[-1]]] = -torch.inf
    lead = predicted.amax(-1) - predicted.gather(-1, greedy[:, n_before:, None])[..., 0]
    wrong = float((lead > by.tolerance * largest).sum())
    same = by.check("logits as in transformers", model(read(tokens), *inputs.values()), expected)
    return [same, Check("wrong greedy tokens", (wrong,), 0.0)]
