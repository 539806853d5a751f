"""Writes docs/sites.md, docs/models.md, docs/fidelity.md, docs/config.md and docs/images/block.svg: the hook points and the
families, collected from models, and the fields of configs.

`make docs` runs it, and tests check that the pages are up to date. `python -m tests.families.measure` measures the differences
between the families' logits and those of transformers.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for the table of architectures in tests/
sys.path.append(str(Path(__file__).parent))

import transformers
from drawing import block_drawing
from transformers import CONFIG_MAPPING

from hooked_lm import HookedTransformer
from hooked_lm.families import CLASSES, OF_TEXT, model_class, model_classes, supported
from hooked_lm.families.well_known import WELL_KNOWN
from hooked_lm.hub.unsupported import NOT_YET, missing
from hooked_lm.models.base import ON_DEMAND_FLAGS
from hooked_lm.models.config import flat
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedEncoderDecoderConfig, HookedTransformerConfig
from hooked_lm.models.config.row import EVERY_KIND, FlatField, table
from tests.families import CASES, ENCODER_CASES, VISION_CASES, Case
from tests.families._composite import COMPOSITES
from tests.families._models import hooked
from tests.families._vision import hooked_any

CLASSES_OF = model_classes()
MEANING = {
    "hook_tokens": "token ids",
    "hook_embed": "what the token embedding adds to the stream",
    "hook_pos_embed": "what the position embedding adds; only where positions are embedded",
    "hook_patch_embed": "the vectors of an image's patches",
    "hook_image_features": "the vectors of image tokens, as they enter the text; of a pair, the image before its norm",
    "hook_text_features": "the text's vector before its norm",
    "hook_image_embeds": "the image's vector of length one",
    "hook_text_embeds": "the text's vector of length one",
    "hook_logits_per_image": "similarities of images and texts",
    "hook_embed_merged": "the embedded tokens, with the vectors of images in their places",
    "hook_merged": "the patches of a square side by side, normalised where the norm is before this",
    "hook_pooled": "means over squares of patches",
    "hook_resid_pre": "the stream before the block",
    "hook_attn_in": "the stream, one copy a head, before the norm",
    "hook_q_input": "the stream, one copy a head, before the norm, for queries",
    "hook_k_input": "the same for keys",
    "hook_v_input": "the same for values",
    "hook_scale": "the norm's divisor",
    "hook_normalized": "the normalised value, before weight and bias",
    "hook_q": "queries, before their norm and rotary",
    "hook_k": "keys, before their norm and rotary",
    "hook_v": "values",
    "hook_q_proj": "queries before the convolutions",
    "hook_k_proj": "keys before the convolutions",
    "hook_rot_q": "queries after rotary; only with rotary positions",
    "hook_rot_k": "keys after rotary; only with rotary positions",
    "hook_attn_scores": "scores after scale, soft cap and mask; masked ones are minus infinity",
    "hook_pattern": "the scores after softmax",
    "hook_z": "values mixed by the pattern, times the gate if there is one; of a mixer, what queries read from the state",
    "hook_result": "each head's output, without the output bias",
    "hook_attn_out": "exactly what attention adds to the stream",
    "hook_resid_mid": "the stream between attention and MLP; absent in parallel and attention-only blocks",
    "hook_mlp_in": "the stream before the MLP's norm",
    "hook_in": "the module's input",
    "hook_pre": "before the activation; of a gated MLP, the gate's",
    "hook_pre_linear": "the other branch of a gated MLP",
    "hook_post": "after the activation; of a gated MLP, the product of both branches",
    "hook_out": "the module's output",
    "unembed.hook_out": "the logits before any scale and soft cap",
    "hook_mlp_out": "exactly what the MLP adds to the stream",
    "hook_resid_post": "the stream after the block",
    "hook_normalized_resid_mid": "post-norm blocks: the sum at `hook_resid_mid`, normalised, which the MLP reads",
    "hook_normalized_resid_post": "post-norm blocks: the sum at `hook_resid_post`, normalised, which the next block reads",
    "hook_mid": "the activation before the norm inside the MLP; `hook_post` is after it",
    "hook_router_logits": "the router's logit for each expert",
    "hook_expert_indices": "the chosen experts, the first choice first",
    "hook_expert_weights": "the weights of the chosen experts",
    "hook_routed_positions": "row and position of the tokens routed to this expert, in the order of its other sites",
    "hook_shared_gate": "the weight of the shared expert, which reads every token",
    "hook_index_q": "the query of each head of the indexer",
    "hook_index_k": "the key of the indexer, before its norm",
    "hook_index_rot_q": "the indexer's query after rotary",
    "hook_index_rot_k": "the indexer's key after its norm and rotary",
    "hook_index_weights": "the weight of each head of the indexer",
    "hook_index_scores": "the scores by which the indexer chooses keys, or blocks of pooled keys",
    "hook_index_mask": "the keys, or blocks of pooled keys, that were chosen for each query",
    "hook_q_latent": "the latent from which queries are projected, before its norm",
    "hook_kr": "the features of the key that all heads share, before their norm",
    "hook_shortcut_out": "the output of the experts of the block before, which is part of `hook_mlp_out`",
    "hook_pool_k": "what a token adds to pooled keys, which are also values: one vector for each series",
    "hook_pool_gate": "its weight there, before the bias of its place in the block and the softmax over the block",
    "hook_pooled_k": "the pooled key of each block of tokens, before its norm",
    "hook_rot_pooled_k": "the pooled key of each block after its norm and rotary",
    "hook_pooled_v": "the values of blocks: their pooled keys, unless one is edited",
    "hook_pooled_scores": "the scores of blocks of tokens, beside those of single tokens at `hook_attn_scores`",
    "hook_pooled_pattern": "the pattern on blocks of tokens; with `hook_pattern` and the sink it sums to one",
    "hook_rot_z": "mixed values, which rotary has turned as it turns keys; `hook_z` is turned back by the query's position",
    "hook_o_latent": "the latent of attention's output, one for each group of heads",
    "hook_kv_latent": "the latent from which keys and values are projected, before its norm",
    "hook_mixer_in": "the stream before the mixer's norm",
    "hook_mixer_out": "exactly what the mixer adds to the stream",
    "hook_x": "the input of the convolution over positions; of a short convolution, before the factor `hook_B`",
    "hook_prev": "the stream of the previous token, which is mixed with that of the token",
    "hook_conv": "the input of the recurrence: after the convolution and its activation",
    "hook_prev_state": "the state of the router of the layer before, as this layer reads it",
    "hook_router_state": "the state of the router, before its norm",
    "hook_gate": "the gate of the output (of attention: of `hook_z`; of a norm: of its output), before its activation",
    "hook_conv_q": "queries after the convolution and its activation",
    "hook_conv_k": "keys after the convolution and its activation",
    "hook_conv_v": "values after the convolution and its activation",
    "hook_g": "the logarithm of the decay of the state",
    "hook_beta": "the share of the old value under a key that the new value replaces",
    "hook_dt": "the step sizes, after the softplus",
    "hook_B": "how the input enters the state; of a short convolution, the factor of its input",
    "hook_C": "how the state is read",
    "hook_r": "the gate of the decay",
    "hook_i": "the gate of the input",
    "hook_f": "the gate that keeps the state, before its sigmoid",
    "hook_a": "the decay: the share of the state that is kept",
    "hook_state": "the state after each position, of a short convolution its window; an edit changes later ones, as with a cache",
    "hook_y": "the output read from the state, before the gate",
    "hook_per_layer_resid": "the stream that the gate of the per-layer embedding reads",
    "hook_per_layer_in": "the layer's second input besides the stream: its per-layer embedding, or the token ids",
    "hook_per_layer_out": "what the layer adds to the stream from its per-layer embedding",
    "hook_deepstack": "what images add to the stream after the layer: features from inside their tower; 0 at text",
    "hook_attn_mixed": "the output of the shared transformer's attention",
    "hook_transformed": "the output of the shared transformer's MLP",
    "hook_shared_out": "what the shared transformer adds to the input of the mixer",
    "hook_streams_pre": "all residual streams before the block; `hook_resid_pre` is the active one, or their mean",
    "hook_streams_mid": "all residual streams between the sublayers; `hook_resid_mid` is their mean",
    "hook_read": "the weights of the streams in the sum that a sublayer reads",
    "hook_write": "how much of a sublayer's output each stream gets",
    "hook_mix": "how much of each stream goes into each new one, before a sublayer's output is added",
    "hook_predict_coefs": "what each stream gets of each in the prediction, besides itself",
    "hook_predicted": "the predictions of all streams; attention and the low-rank branch read that of the active one",
    "hook_laurel_out": "what the low-rank branch adds to the active stream: its input, and a normalised low-rank map of it",
    "hook_activated": "the active stream after the MLP",
    "hook_correct_coefs": "what each stream gets of the layer's change of the active stream",
    "hook_corrected": "all streams after that change, before the per-layer embedding",
    "hook_streams_post": "all residual streams after the block; `hook_resid_post` is the active one, or their mean",
    "hook_bias": "the position bias, added to the scores for the distance of query and key; in T5 all layers share it",
    "hook_bias_global": "the same for the block of the query and each block of tokens",
    "hook_block_sum": "the sum of the inputs of attention in each block of tokens, before its norm",
    "hook_mask": "1 at the tokens with global attention; a hook there chooses them",
    "hook_q_global": "the query of each global token (Longformer: of each token, were it global)",
    "hook_k_global": "the key of each global token (LongT5: of each block; Longformer: of each token, for global queries)",
    "hook_v_global": "the value that belongs to that key",
    "hook_z_global": "the mixed values of each global token",
    "hook_attn_scores_to_global": "the scores of a token's query with the keys of global tokens",
    "hook_pattern_to_global": "the share of global tokens in the softmax of a query, over them and the tokens of its block",
    "hook_attn_scores_among_global": "the scores of a global token's query with the keys of global tokens",
    "hook_attn_scores_from_global": "the scores of a global token's query with the keys of tokens",
    "hook_pattern_among_global": "the share of global tokens in the softmax of a global token's query, over them and all tokens",
    "hook_pattern_from_global": "the share of tokens in that softmax",
    "hook_global_resid_pre": "the stream of global tokens before the block",
    "hook_global_attn_out": "exactly what attention adds to the stream of global tokens",
    "hook_global_resid_mid": "the stream of global tokens between the sublayers",
    "hook_global_mlp_pre": "`hook_pre` of the MLP on global tokens",
    "hook_global_mlp_post": "`hook_post` of the MLP on global tokens",
    "hook_global_mlp_out": "exactly what the MLP adds to the stream of global tokens",
    "hook_global_resid_post": "the stream of global tokens after the block",
    "hook_bucket_bias": "the bias of the scores for each bucket of relative positions, made of the stream",
    "hook_attn_scores_own": "the score of a predicting stream's query with the key of the same stream at the same position",
    "hook_pattern_own": "the share of that key in the softmax over it and the keys of the main stream",
    "hook_attn_scores_global": "the scores of blocks of tokens, with their bias",
    "hook_pattern_global": "the share of blocks of tokens in the softmax over tokens and blocks",
    "hook_key_bias": "what is added to the scores of each key, made of its value",
    "hook_c2p": "content-to-position scores: the query's content and the key's relative position",
    "hook_p2c": "position-to-content scores: the query's relative position and the key's content",
    "hook_kernel_scores": "the kernel of each convolving head at each position, before its softmax over offsets",
    "hook_kernel": "that kernel after the softmax",
    "hook_conv_pre": "the convolution beside the first block, before its activation",
    "hook_conv_out": "exactly what that convolution adds to the stream",
    "hook_resid_conv": "the stream plus `hook_conv_out`, before its norm",
    "hook_resid_mlp": "the stream plus `hook_mlp_out`, before the adapter",
    "hook_adapter_in": "the adapter's input: that sum after its norm, if there is one",
    "hook_adapter_out": "exactly what the adapter adds to the stream",
    "hook_narrow_post": "the narrow stream after all MLPs of a block, before its norm",
    "hook_normalized_narrow_post": "the same after its norm",
    "hook_narrow_out": "exactly what the narrow stream adds to the wide one",
    "hook_narrow_embed": "the embedding of each token alone, before three of them are joined",
    "hook_token_type_embed": "what the embedding of the segment (first or second text) adds",
    "hook_extra_embed": "what the embedding of a token's box, cell or task adds",
    "hook_concat": "the embeddings of a token and of its shape and pronunciation, side by side",
    "hook_full_embed": "the normalised sum of the embeddings: the input of the first block",
    "hook_pooler_out": "the pooler's output at the first position: the input of the heads for whole texts",
    "hook_nsp_out": "the logits of next-sentence prediction",
    "hook_encoder_out": "the encoder's output, which the decoder's cross-attention reads in every layer",
    "hook_decoder_tokens": "token ids of the decoder",
    "hook_decoder_embed": "what the decoder's token embedding adds to its stream",
    "hook_decoder_pos_embed": "what the decoder's position embedding adds to its stream",
    "hook_cross_attn_in": "the stream before the norm of cross-attention",
    "hook_cross_attn_out": "exactly what cross-attention adds to the stream",
    "hook_resid_mid_cross": "the stream between cross-attention and MLP",
    "hook_normalized_resid_mid_cross": "post-norm blocks: the sum at `hook_resid_mid_cross`, normalised",
}

HEAD = """# Sites

Every hook point of a common decoder, in order of computation; `{i}` is a layer. Sites *on demand* are not in a cache without a
filter. Name them in a filter or a hook (a name, list or glob) to compute them. A predicate selects them only if it matches no
other site, and a loop over `model.hook_dict` omits them unless their flag is set. Axes: `kv_head` equals `head` unless heads
share keys and values; `query_pos` and `key_pos` are positions.

Short names: `cache["z", 5]`, `cache["resid_post", -1]`, `cache["scale", 4, "ln1"]`, `cache["k6"]`.

| site | shape | meaning |
|---|---|---|
"""


def models() -> list[HookedTransformer]:
    """A model with learned positions, and one with rotary positions, gates, query/key norms and post-norms."""
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5}
    modern = {"gated_mlp": True, "use_qk_norm": True, "normalization_type": "RMS", "act_fn": "silu"}
    positions = {"positional_embedding_type": "rotary", "use_normalization_before_and_after": True}
    configs = [{**sizes, "act_fn": "gelu"}, {**sizes, **modern, **positions}]
    return [HookedTransformer(HookedTransformerConfig(**config)) for config in configs]


def rows() -> list[str]:
    """One table row per site: those of the modern model, after those that only the classic one has."""
    classic, modern = (model.all_points() for model in models())
    points = {**{name: classic[name] for name in ("hook_tokens", "hook_embed", "hook_pos_embed")}, **modern}
    lines = []
    for name, point in points.items():
        leaf = name.rpartition(".")[2]
        shape = " ".join(point.dims) + (", on demand" if point.on_demand else "")
        flag = f" (`cfg.{ON_DEMAND_FLAGS[leaf]}`)" if leaf in ON_DEMAND_FLAGS and point.on_demand else ""
        lines.append(f"| `{name.replace('blocks.0', 'blocks.{i}')}` | {shape}{flag} | {meaning(name)} |")
    return lines


def meaning(name: str) -> str:
    """What a site holds: said of its module and leaf, or of all sites with this leaf.

    Raises:
        KeyError: `MEANING` has neither.
    """
    *_, module, leaf = ("", *name.split("."))
    if leaf not in MEANING:
        raise KeyError(f"docs/generate.py has no meaning for {name!r}: add it to MEANING")
    return MEANING.get(f"{module}.{leaf}", MEANING[leaf])


def class_name_of(case: Case) -> str:
    """The class of a row's model."""
    return model_class(case.family) if case.family in supported() else type(hooked_any(case)).__name__


def points_of(case: Case) -> dict[str, Any]:
    """The hook points of a row's model, in the order of computation."""
    return (hooked if case.family in supported() else hooked_any)(case).all_points()


HEADS = (
    "PreTraining",
    "MaskedLM",
    "NextSentencePrediction",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)


@cache
def cases() -> tuple[Case, ...]:
    """The rows of the tests, and the first of each encoder with the other heads that transformers has for it and that load."""
    first = {case.family: case for case in reversed(ENCODER_CASES)}
    others = [
        replace(case, name=f"{case.name}-{head}", auto=f"AutoModelFor{head}")
        for case in first.values()
        for head in HEADS
        if CONFIG_MAPPING[case.family] in getattr(transformers, f"AutoModelFor{head}")._model_mapping
    ]
    return (*CASES, *(case for case in others if loads(case)))


def loads(case: Case) -> bool:
    try:
        points_of(case)
    except ValueError:
        return False
    return True


def any_layer(site: str) -> str:
    """A site's name with `{i}` for layers, `{e}` for experts and `{n}` for predicting streams."""
    site = re.sub(r"\bexperts\.\d+\b", "experts.{e}", re.sub(r"^((?:\w+\.)?\w+)\.\d+\.", r"\1.{i}.", site))
    return re.sub(r"\bpredicting\.\d+\b", "predicting.{n}", site)


def sites_of_families(class_name: str) -> dict[str, dict[str, Any]]:
    """Site -> its shapes and the families that have it, over the families of a class, in the order of computation."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases() if class_name in OF_TEXT.values() else VISION_CASES:
        if class_name_of(case) == class_name:
            for name, point in points_of(case).items():
                entry = found.setdefault(any_layer(name), {"shapes": {}, "families": {}, "on demand": point.on_demand})
                entry["shapes"][" ".join(point.dims)] = entry["families"][case.family] = None
    return found


def listing(class_name: str, known: set[str]) -> list[str]:
    """One table row per site of a class of models that is not in `known`; adds the names to `known`."""
    lines = []
    for name, entry in sites_of_families(class_name).items():
        families = sorted(entry["families"])
        if re.sub(r"^(encoder|decoder)\.", "blocks.", name) in known or re.sub(r"^(vision|text)\.", "", name) in known:
            continue
        known.add(name)
        shape = " or ".join(entry["shapes"]) + (", on demand" if entry["on demand"] else "")
        who = ", ".join(families[:4]) + (f" and {len(families) - 4} more" if len(families) > 4 else "")
        lines.append(f"| `{name}` | {shape} | {meaning(name)} | {who} |")
    return lines


OTHER_HEADS = {
    "HookedTransformer": """
## Sites that only some families have

`{e}` is an expert. `routed` is the axis of the tokens routed to it.

""",
    "HookedEncoder": """
## Encoders

A `HookedEncoder` has the sites of a decoder's blocks, and these:

""",
    "HookedEncoderDecoder": """
## Encoder-decoders

The blocks of a `HookedEncoderDecoder` are `encoder.{i}` and `decoder.{i}`. They have the sites of a decoder's `blocks.{i}`,
and these:

""",
    "HookedVisionEncoder": """
## Vision encoders

The batch of a `HookedVisionEncoder` are images. Its positions are class tokens, then patches, row by row from the upper left.
It has the sites of a decoder's blocks, and these:

""",
    "HookedVisionLanguage": """
## Vision-language models

The decoder of a `HookedVisionLanguage` has its usual sites, also under names that begin with `language.`. The tower has the
sites of a vision encoder under names that begin with `vision.`. Besides there are these:

""",
    "HookedDualEncoder": """
## Pairs of towers

The towers of a `HookedDualEncoder` have the sites of a vision encoder under names that begin with `vision.`, and those of an
encoder under names that begin with `text.`. Besides there are these:

""",
}
COLUMNS = "| site | shape | meaning | families |\n|---|---|---|---|\n"


def page() -> str:
    """The content of docs/sites.md."""
    known = {any_layer(name) for model in models() for name in model.all_points()}
    text = HEAD + "\n".join(rows()) + "\n"
    for class_name, head in OTHER_HEADS.items():
        lines = listing(class_name, known)
        text += head + COLUMNS + "\n".join(lines) + "\n" if lines else ""
    return text


MODELS_HEAD = """# Models

The architectures whose checkpoints load, by the `model_type` in `config.json`: the class of the model, its components, the
sites that it has besides those of [Sites](sites.md) (in at least one tested config), the sites that it lacks (in all tested
configs), and the largest difference of its logits from those of transformers (fp32, logits of order one, over the tested tiny
random configs).

`hooked-lm models NAME` searches these names, and says of a hub id or a folder whether it loads; `hooked-lm verify PATH_OR_NAME`
compares a checkpoint with transformers.

[Composites](#composites), which read images or sounds besides text, have the `model_type` of their language model here.

## By the names that people use

| models | model_type | class |
|---|---|---|
{well_known}

## All

| model_type | class | built from | other sites | missing sites | largest difference, configs |
|---|---|---|---|---|---|
"""
COMPOSITES_HEAD = """
## Composites

Of a checkpoint that reads images or sounds besides text, `from_pretrained` loads the language model, on text alone: of any
composite whose language model has a `model_type` in the table above that writes text, as a decoder or an encoder-decoder
(Florence-2, BLIP-2 with Flan-T5). It is found by one rule: its config is `text_config`, its tensors are those with the prefix
of its embedding (`language_model.`, `model.language_model.`, `model.text_model.`, ...), or those of its modules where they lie
beside the towers. What was left out (towers, projectors) is
logged once, as a warning of the logger `hooked_lm.hub.hf_load`, and in `model.cfg.left_out`; so are parts of the language model
that only images use (the cross-attention layers of Llama 3.2 Vision, without which layers are counted as in Llama 3.1; the
experts for images of ERNIE 4.5 VL). Other tensors of the language model that no family reads are refused. `to_hf` and
`save_pretrained` refuse, as the composite cannot be written back; `model.cfg.left_out = None` lets them write the language model
alone, where transformers has a class for it.

On text alone the logits are those of the composite in transformers; tokens that stand for images count as any other token.
Three things to know:

- Rotary positions on several axes (Qwen2-VL and its descendants) are the usual ones on text, and features that are added to
  later layers (Qwen3-VL, Granite) are absent.
- PaliGemma was trained on prompts that see each other in both directions. Here attention is causal, as for the text that it
  generates.
- Most composites of transformers leave out what their language model alone does to its logits, and was trained with: the scale
  of Cohere 2 (Aya Vision, Cohere 2 Vision) and of Granite (Granite Speech, LLaVA-NeXT around Granite), a soft cap of Gemma 3.
  Here every class applies it, `HookedTransformer` and `HookedVisionLanguage`, and a warning in the log says so;
  `hooked-lm verify` compares with it.

These composites are tested against transformers, from files in the names that transformers writes and in those of its modules:

| composite | language model |
|---|---|
"""
VISION_HEAD = """
## Models that read images

`HookedVisionEncoder.from_pretrained` loads a tower, `HookedVisionLanguage.from_pretrained` a tower, a projector and a decoder,
`HookedDualEncoder.from_pretrained` a tower of images and one of texts. Of a vision-language checkpoint
`HookedTransformer.from_pretrained` loads the language model alone. The differences are those of the answers of towers, of the
logits after two images among words, and of the similarities of images and texts.

| model_type | class | built from | other sites | missing sites | largest difference, configs |
|---|---|---|---|---|---|
"""
MISSING_HEAD = """
## Missing

The causal, masked, sequence-to-sequence and image-text models of transformers that do not load (`hooked-lm models --missing`),
and what they need, or why there is nothing to compare with. `hooked_lm.hooks.wrap(model)` hooks any of them by the names of its
modules.

"""
EVERYWHERE = {"DecoderConfig", "EncoderConfig", "EncoderDecoderConfig", "Embed", "Unembed"}
OPTIONAL = ("hook_pos_embed", "hook_rot_", "hook_pre_linear", "q_norm.", "k_norm.", "ln1_post.", "ln2_post.")


def parts(cfg: Any) -> Iterator[str]:
    """Yields the names of the component classes in a config tree, outermost first."""
    if isinstance(cfg, (tuple, list)):
        for item in cfg:
            yield from parts(item)
    elif is_dataclass(cfg) and not isinstance(cfg, type):
        owner, _, nested = type(cfg).__qualname__.rpartition(".")
        if owner or not nested.endswith("Config"):
            yield owner or nested
        for field in fields(cfg):
            yield from parts(getattr(cfg, field.name))


def listed(names: list[str]) -> str:
    """Names of sites for a table cell, grouped by module."""
    below: dict[str, list[str]] = {}
    for name in names:
        part, _, leaf = name.removeprefix("blocks.{i}.").rpartition(".")
        below.setdefault(part, []).append(leaf.removeprefix("hook_"))
    return ", ".join(
        f"`{part}{'.' if part else ''}hook_{leaves[0] if len(leaves) == 1 else '{' + ','.join(leaves) + '}'}`"
        for part, leaves in below.items()
    )


def family_row(name: str, parity: dict[str, Any], standard: list[str]) -> str:
    """The table row of a family; `standard` are the usual sites of its class."""
    trees, sites, is_text = [], dict[str, None](), name in supported()
    for case in (*cases(), *VISION_CASES):
        if case.family == name:
            trees.append((hooked if is_text else hooked_any)(case).cfg.tree)
            sites |= dict.fromkeys(any_layer(site) for site in points_of(case))
            class_name = class_name_of(case)
    missing = [site for site in standard if site not in sites and not any(word in site for word in OPTIONAL)]
    cells = [
        f"`{name}`",
        class_name,
        ", ".join(part for part in dict.fromkeys(parts(trees)) if part not in EVERYWHERE),
        listed([site for site in sites if site not in standard]),
        listed(missing),
        "{largest:.1e} in {configs}".format(**parity[name]) if name in parity else "not measured",
    ]
    return "| " + " | ".join(cells) + " |"


def standard_sites(class_name: str) -> list[str]:
    """The usual sites of a class: for decoders those at the top of docs/sites.md, for others those that all families have."""
    if class_name in ("HookedTransformer", "HookedVisionLanguage"):
        return list(dict.fromkeys(any_layer(site) for model in models() for site in model.all_points()))
    found = sites_of_families(class_name)
    families = {family for entry in found.values() for family in entry["families"]}
    return [site for site, entry in found.items() if entry["families"].keys() == families]


def missing_list() -> str:
    """The model types of transformers that do not load, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for model_type, reason in missing().items():
        by_reason.setdefault(reason, []).append(f"`{model_type}`")
    ordered = sorted(by_reason.items(), key=lambda item: (not item[0].startswith(NOT_YET), item[0]))
    return "".join(f"- {reason}: {', '.join(model_types)}\n" for reason, model_types in ordered)


def models_page() -> str:
    """The content of docs/models.md."""
    parity = json.loads(Path(__file__).with_name("parity.json").read_text())
    standard = {name: standard_sites(name) for name in {model_class(name) for name in supported()}}
    lines = [family_row(name, parity, standard[model_class(name)]) for name in supported()]
    inside = {case.composite: case.family for case in CASES if case.composite is not None}
    composites = [f"| `{kind}` | `{text}` |" for kind, text in sorted((COMPOSITES | inside).items())]
    known = "\n".join(f"| {names} | `{kind}` | {' or '.join(CLASSES_OF[kind])} |" for kind, names in WELL_KNOWN.items())
    tables = (
        MODELS_HEAD.replace("{well_known}", known)
        + "\n".join(lines)
        + "\n"
        + COMPOSITES_HEAD
        + "\n".join(composites)
        + "\n"
    )
    return tables + vision_table(parity) + MISSING_HEAD + missing_list()


def vision_table(parity: dict[str, Any]) -> str:
    """The section of the models that read images."""
    classes = [name for name in CLASSES.values() if name not in OF_TEXT.values()]
    standard, tested = {kind: standard_sites(kind) for kind in classes}, {case.family for case in VISION_CASES}
    names = [(kind, name) for kind in classes for name in supported(kind)]
    lines = [family_row(name, parity, standard[kind]) for kind, name in names if name in tested]
    alone = code(name for _, name in names if name not in tested)
    note = f"\nThese towers load alone too, and are tested with the models that they are parts of: {alone}.\n"
    return VISION_HEAD + "\n".join(lines) + "\n" + note


# ---- the fields of configs -------------------------------------------------------------------------------------------

CONFIGS = (HookedTransformerConfig, HookedEncoderConfig, HookedEncoderDecoderConfig)
CONFIG_HEAD = """# Config fields

The fields of `HookedTransformerConfig`, `HookedEncoderConfig` and `HookedEncoderDecoderConfig`, printed from the table in
`hooked_lm/models/config/flat.py`. A field that is set, in the constructor, by `dataclasses.replace` or by assignment, takes
effect or is refused by name. A field that follows from others is computed again when they change, unless it was set itself.
The last column names the kinds of model that have the field, if not all have it.

## Of the tree

These fields describe the tree of component configs from which a model is built (`cfg.tree`), and are read from it. `*` stands
for each layer; where layers differ, the field describes the first one. `part[Class]` is a part of that class. A field may be set
without effect together with one of those that *switch it off*, as in a dictionary of all fields.

| field | type | default | meaning | in the tree | follows from | switched off by | models |
|---|---|---|---|---|---|---|---|
"""
FACTS_HEAD = """
## Of the model

These fields are facts about the model, its weights and its text; the tree does not depend on them.

| field | type | default | meaning | follows from | models |
|---|---|---|---|---|---|
"""


def code(names: Iterable[str]) -> str:
    """Names for a table cell."""
    return ", ".join(f"`{name}`" for name in names)


def formulas() -> dict[str, str]:
    """Field -> how it follows from others, as the table in the source says it."""
    calls = {}
    for node in ast.walk(ast.parse(inspect.getsource(flat))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            follows = [keyword.value for keyword in node.value.keywords if keyword.arg == "follows"]
            calls.update(zip([node.target.id], follows, strict=False))
    return {name: ast.unparse(value.body) for name, value in calls.items() if isinstance(value, ast.Lambda)}


def default_of(name: str) -> str:
    """The default of a field, and the ones that other classes of configs have."""
    found = {cls.kind: {f.name: f for f in fields(cls)}.get(name) for cls in CONFIGS}
    defaults = {kind: f.default for kind, f in found.items() if f is not None}
    made = {kind: f.default_factory for kind, f in found.items() if f is not None and f.default_factory is not MISSING}
    defaults |= {kind: make() for kind, make in made.items()}
    first, *others = defaults.items()
    text = "" if first[1] is MISSING else f"`{first[1]!r}`"
    return text + "".join(f"; {kind}: `{value!r}`" for kind, value in others if value != first[1])


def config_row(name: str, row: FlatField, kind: Any, formula: str) -> str:
    """The table row of a field."""
    kinds = "" if row.kinds == EVERY_KIND else ", ".join(row.kinds)
    kind = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    follows = f"`{formula}`" if formula else code(row.sources)
    where = [code(path or "the whole tree" for path in row.paths), follows, code(row.unless)]
    types = " or ".join(f"`{part}`" for part in kind.split(" | "))  # a table's cell has no bars
    cells = [f"`{name}`", types, default_of(name), row.doc, *(where[1:2] if row.is_fact else where), kinds]
    return "| " + " | ".join(cells) + " |"


def config_page() -> str:
    """The content of docs/config.md."""
    rows = {name: row for cls in CONFIGS for name, row in table(cls).rows.items()}
    kinds, found = {f.name: f.type for cls in reversed(CONFIGS) for f in fields(cls)}, formulas()
    lines = {name: config_row(name, row, kinds[name], found.get(name, "")) for name, row in rows.items()}
    of_tree, facts = (
        [lines[name] for name, row in rows.items() if row.is_fact == is_fact] for is_fact in (False, True)
    )
    return CONFIG_HEAD + "\n".join(of_tree) + "\n" + FACTS_HEAD + "\n".join(facts) + "\n"


# ---- differences from transformers --------------------------------------------------------------------------------------

FIDELITY_HEAD = """# Fidelity

The largest difference between the logits of each family here and in transformers: tiny random models in float32, logits of
order one, over all tested configs of the family.

`python -m tests.families.measure` measures them again and writes `docs/parity.json`. `hooked-lm verify PATH_OR_NAME`
compares a checkpoint of your own, and checks the [identities](glossary.md) between its sites. The same configs are tested for
gradients, bfloat16 (no further from float64 than transformers), padding, generation and export
([what a row tests](new-architecture.md#the-test)).

Where the model of transformers is not the one that was trained, or contradicts itself, the difference is stated:

- A config field that transformers does not read, with another value than it assumes, is refused by its name; so is a field that
  contradicts another one. `tests/families/flips.py` changes each field that a family does not read, and fails if the logits of
  transformers move.
- Composites keep the scale and the soft cap of their language model's logits ([models](models.md#composites)).
- Generation with and without a key/value cache differs past the trained length where rotary angles depend on the length (dynamic
  NTK, LongRoPE), here as in transformers: the cache keeps the keys of the shorter sequences. [Prefixes and
  chunks](scale.md#prompts-with-one-beginning) are refused there.

"""


def fidelity_page() -> str:
    """The content of docs/fidelity.md."""
    parity = json.loads(Path(__file__).with_name("parity.json").read_text())
    largest = max(found["largest"] for found in parity.values())
    n_configs = sum(found["configs"] for found in parity.values())
    said = f"**{len(parity)} families, {n_configs} configs, largest difference {largest:.1e}.**\n\n"
    lines = [f"| `{name}` | {found['largest']:.1e} | {found['configs']} |" for name, found in sorted(parity.items())]
    return (
        FIDELITY_HEAD
        + said
        + "| model_type | largest difference | configs |\n|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


def drawing_of_a_block() -> str:
    """The content of docs/images/block.svg."""
    return block_drawing(HookedTransformer.from_pretrained("demo"))


if __name__ == "__main__":
    Path(__file__).with_name("fidelity.md").write_text(fidelity_page())
    Path(__file__).with_name("images").joinpath("block.svg").write_text(drawing_of_a_block())
    Path(__file__).with_name("sites.md").write_text(page())
    Path(__file__).with_name("models.md").write_text(models_page())
    Path(__file__).with_name("config.md").write_text(config_page())
