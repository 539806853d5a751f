"""Compares a checkpoint loaded by this library with the same checkpoint loaded by transformers."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.hub.compare_images import ReadsImages, compared, words
from hooked_lm.hub.hf_checkpoint import HFCheckpoint, from_source
from hooked_lm.hub.load import check_name, load
from hooked_lm.hub.logit_factors import left_out_by_transformers, with_factors
from hooked_lm.hub.model_classes import Model, model_class
from hooked_lm.hub.options import Options, one_device
from hooked_lm.hub.source import WEIGHT_FILES, find
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.verification.verify import Check, Verification
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.models.vision.vision_language import VisionLanguage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# name of an output in transformers -> our return type
HEADS = {
    "last_hidden_state": "embeddings",
    "pooler_output": "pooled",
    "logits": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "nsp",
    "sop_logits": "nsp",
}


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
    the language model is compared with the composite, on text alone, and the names of these checks say so.
    Numbers may differ by 1e-4 of the largest (four machine epsilons in low precision). A greedy token of transformers counts
    as wrong if our logit of another token is larger by more than that.
    """
    check_name(model_name)
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    options = Options(dtype=dtype, device=one_device(device), **where)
    source = find(model_name, WEIGHT_FILES, **options.download)
    if (reader := from_source(source, options).reader_of_all) is not None:
        options = replace(options, reads_images=reader)
    model, checkpoint = load(model_name, options, model_class).eval(), from_source(source, options)
    reference = _reference(model, checkpoint, source.folder()).to(model.device).eval()
    tolerance = max(1e-4, 4 * torch.finfo(model.cfg.dtype).eps)

    def complete(logits: Tensor) -> Tensor:
        """Logits of transformers, with what the class of a composite leaves out."""
        is_decoder = isinstance(model, Decoder)
        lacking = is_decoder and left_out_by_transformers(checkpoint.whole_type, model.tree.unembed)
        return with_factors(logits, model.tree.unembed) if lacking else logits

    pairs = compared(model, reference, complete) if isinstance(model, ReadsImages) else ()
    checks = [Check(name, (_error(*pair),), tolerance) for name, *pair in pairs]
    if isinstance(model, (DualEncoder, VisionEncoder)):
        return Verification((*checks, *model.verify().checks))
    tokens = _tokens(model, checkpoint.config)
    if isinstance(model, Encoder):
        found = _encoder_pairs(model, reference, tokens)
        checks += [Check(f"{name} as in transformers", (_error(*pair),), tolerance) for name, pair in found]
    else:
        of_text = _logits_and_greedy(model, _text_part(reference), tokens, n_tokens, tolerance, complete)
        is_part = checkpoint.whole is not None or isinstance(model, VisionLanguage)
        what = ", of the language model alone" if checkpoint.whole is not None else ", on text alone"
        checks += [replace(check, name=check.name + what * is_part) for check in of_text]
    identities = model.verify() if isinstance(model, VisionLanguage) else model.verify(tokens)
    return Verification((*checks, *identities.checks))


def _tokens(model: Model, config: "PreTrainedConfig") -> Int[Tensor, "batch pos"]:
    """Random token ids; of a vision-language model none of images."""
    length = min(16, model.cfg.n_ctx - 1)
    if isinstance(model, VisionLanguage):
        return words(model, length).to(model.device)
    tokens = torch.randint(model.cfg.d_vocab, (2, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    return tokens if isinstance(model, Decoder) else _without_padding(tokens, config)


def _reference(model: Model, checkpoint: HFCheckpoint, folder: Path) -> Any:
    """The model of transformers in a folder; of a composite, the part that reads images and text."""
    options: dict[str, Any] = {"dtype": model.cfg.dtype, "local_files_only": True}
    if checkpoint.whole is None and not isinstance(model, VisionLanguage):
        return _transformers_class(model, checkpoint.config).from_pretrained(folder, **options)
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


def _transformers_class(model: Model, config: "PreTrainedConfig") -> Any:
    """The class that transformers would load for this kind of model."""
    import transformers

    if isinstance(model, (DualEncoder, VisionEncoder)):
        named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        return named or transformers.AutoModel._model_mapping[type(config)]
    if isinstance(model, Decoder):
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if not isinstance(model, Encoder):
        return transformers.AutoModelForSeq2SeqLM._model_mapping[type(config)]
    if config.architectures:
        return getattr(transformers, config.architectures[0])
    return (transformers.AutoModel if model.unembed is None else transformers.AutoModelForMaskedLM)._model_mapping[
        type(config)
    ]


def _without_padding(tokens: Tensor, config: "PreTrainedConfig") -> Tensor:
    """Replaces pad token ids, as some models give padding a special position or none."""
    pad = -1 if config.pad_token_id is None else config.pad_token_id
    return torch.where(tokens == pad, (tokens + 1) % config.vocab_size, tokens)


def _error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def _encoder_pairs(
    model: Encoder, reference: "PreTrainedModel", tokens: Tensor
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yields name, our output and that of transformers, for each output of the transformers class."""
    found = reference(tokens)
    for name, return_type in HEADS.items():
        if found.get(name) is not None:
            yield return_type, (model(tokens, return_type=return_type), found[name])
    if "start_logits" in found:
        yield "logits", (model(tokens), torch.stack([found.start_logits, found.end_logits], -1))


def _text(model: Model, tokens: Int[Tensor, "batch pos"]) -> Rows:
    """Text as transformers reads it without token types: no prompt that is read in both directions."""
    is_suffix = torch.ones_like(tokens, dtype=torch.bool)
    return VisionInputs(tokens, is_suffix=is_suffix) if isinstance(model, VisionLanguage) else tokens


def _logits_and_greedy(
    model: Decoder | EncoderDecoder,
    reference: "PreTrainedModel",
    tokens: Tensor,
    n_tokens: int,
    tolerance: float,
    complete: Callable[[Tensor], Tensor],
) -> list[Check]:
    """Checks the logits and the greedy tokens of a decoder or an encoder-decoder; `complete` is for logits of transformers."""
    from transformers import GenerationConfig

    is_decoder = isinstance(model, Decoder)
    banned = [model.tree.image_token] if isinstance(model, VisionLanguage) else []  # without an image there may be none
    options: dict[str, Any] = (
        {} if is_decoder else {"decoder_start_token_id": model.start_id(), "forced_bos_token_id": None}
    )
    reference.generation_config = GenerationConfig(pad_token_id=0, **options)
    # the decoder may have its own vocabulary
    inputs = {} if is_decoder else {"decoder_input_ids": tokens % model.cfg.d_vocab_out}
    expected = complete(reference(tokens, **inputs).logits)
    largest = expected.abs().max().clamp(min=1.0)
    error = ((model(_text(model, tokens), *inputs.values()) - expected).abs().max() / largest).item()
    n_before = tokens.shape[1] if is_decoder else 1
    options = {"max_new_tokens": min(n_tokens, model.cfg.n_ctx - n_before), "do_sample": False}
    options["suppress_tokens"] = banned or None
    greedy = reference.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    predicted = (model(_text(model, greedy)) if is_decoder else model(tokens, greedy))[:, n_before - 1 : -1]
    predicted[..., [token for token in banned if token < predicted.shape[-1]]] = -torch.inf
    lead = predicted.amax(-1) - predicted.gather(-1, greedy[:, n_before:, None])[..., 0]
    wrong = float((lead > tolerance * largest).sum())
    return [Check("logits as in transformers", (error,), tolerance), Check("wrong greedy tokens", (wrong,), 0.0)]
