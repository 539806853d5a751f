"""Random legal configs of a family, from a seed.

`python -m tests.families.random_configs NAME ...` lists the fields of families that keep their value, or lack an effect.

A config starts as a line of the table. Of the fields that our side reads, those of nested configs included, about half get
another value. Whether the result is legal, transformers decides: it builds the model and runs it. Changes that are not legal
together are halved until those remain that are. What we refuse by name is left out and counted; what we accept has to give the
same numbers.
"""

import copy
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hooked_lm.families import OF_TEXT, family
from hooked_lm.families._shared.reader import NO_EFFECT, HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from tests.close import tolerance
from tests.families import CASES, VISION_CASES
from tests.families._answers import Answers, in_dtype, inputs, kind, of_ours, of_transformers, ours
from tests.families._case import Case, config_of, reference
from tests.families._field_values import LAYERS, Place, another, is_read, together
from tests.families._models import MODERATE, default_dtype, distance
from tests.families._vision import VisionCase

Path = tuple[str, ...]  # the name of a field, after those of the configs that it is in
SHARE = 0.5  # of the fields change
FITTING = 0.8  # of the values come with others that fit them
REFUSALS = 3  # of a field's values, and none that is accepted: it has one value
NO_FIELDS = {"architectures", "model_type", "id2label", "quantization_config", "is_encoder_decoder"}
SIZES_FIRST = (*LAYERS, "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads", "head_dim")
HEADS = ("MaskedLM", "PreTraining", "NextSentencePrediction", "SequenceClassification", "TokenClassification")
CLASSES = ("AutoModel", *(f"AutoModelFor{head}" for head in (*HEADS, "QuestionAnswering")))
# Fields that keep their values, by family and path, and why.
FIXED = {
    "*.is_decoder": "a decoder made of an encoder is refused",
    "*.add_cross_attention": "for decoders made of encoders",
    "*.per_layer_config*": "sizes of single layers, which have to fit each other",
    "*.image_token_*": "prompts have this token where an image is",
    "*.image_grid_pinpoints": "prompts have as many tokens as there are tiles of this size",
    "*.mamba_d_head": "mamba_n_heads times it is the width of the mixer",
    "*.mm_tokens_per_image": "prompts have as many tokens as there are patches after pooling",
    "*.scale_factor": "prompts have as many tokens as there are patches after merging",
    "*.spatial_merge_size": "prompts have as many tokens as there are patches after merging",
    "*.vision_aspect_ratio": "prompts have as many tokens as there are tiles",
    **dict.fromkeys(
        ("axk1.head_dim", "deepseek_v3.head_dim", "longcat_flash.head_dim", "youtu.head_dim"),
        "other values than qk_rope_head_dim are refused",
    ),
    "bitnet.head_dim": "transformers norms hidden_size features, of all heads, before the output",
    "bloom.seq_length": "of checkpoints of old versions",
    "dbrx.attn_config.rope_theta": "transformers does not read it; the model was trained with it",
    "dbrx.ffn_config.hidden_size": "transformers replaces it by d_model",
    "dbrx.ffn_config.moe_jitter_eps": "of training",
    "dbrx.ffn_config.moe_loss_weight": "of training",
    "dbrx.tie_word_embeddings": "transformers refuses it",
    "deberta-v2.attention_head_size": "the output of transformers takes hidden_size features, of all heads",
    "deepseek_ocr2_text.head_dim": "transformers replaces it by an equal part of hidden_size",
    "doge.keep_window_size": "of equal keys transformers keeps some by chance; test_a_few_keys_by_their_values has none",
    "dots3_note_text.head_dim": "its rotary part is qk_rope_head_dim of it: transformers divides, and multiplies",
    "esm.is_folding_model": "refused",
    "esmc.head_dim": "heads have equal parts of hidden_size",
    "esmc.num_key_value_heads": "transformers demands num_attention_heads of them",
    "esmc.tie_word_embeddings": "transformers never ties them",
    "flaubert.*lang*": "embeddings of languages are refused: only one of n_langs and use_lang_emb has another value",
    "flaubert.is_encoder": "it is an encoder",
    "flaubert.pre_norm": "refused",
    "fnet.use_tpu_fourier_optimizations": "for other sizes",
    "gemma3.text_config.final_logit_softcapping": "transformers leaves it out; its language model was trained with it",
    "gemma3n_text.use_bidirectional_attention": "refused; no model of transformers has it",
    "gemma4*_text.use_bidirectional_attention": "'all' is refused; the others differ on images",
    "glm*_text.attention_bias": "the same in every model",
    "glm4v_text.head_dim": "other values than an equal part of hidden_size are refused",
    "gpt_neo.num_layers": "follows from attention_layers",
    "laguna.moe_apply_router_weight_on_input": "transformers builds no model with it",
    "laguna.num_attention_heads": "num_attention_heads_per_layer counts",
    "longcat_flash.mla_scale_*": "not fields of transformers",
    "longcat_flash.router_bias": "refused",
    "mimo_v2_flash.partial_rotary_factor": "a part of rope_parameters",
    "mistral4.head_dim": "other values than the sum of both parts are refused",
    "mllama_text_model.head_dim": "heads have equal parts of hidden_size",
    "mobilebert.true_hidden_size": "follows from use_bottleneck",
    "mpnet.relative_attention_num_buckets": "transformers looks up as many as there are by default",
    "mpt.attn_config.attn_impl": "names a kernel",
    "*mt5.tie_word_embeddings": "transformers always says that it is True",
    "olmoe.head_dim": "transformers norms hidden_size features, of all heads",
    "pixtral.head_dim": "other values than an equal part of hidden_size are refused",
    "qwen2*_vl.use_sliding_window": "of text_config; old checkpoints repeat it",
    "qwen2*_vl_text.head_dim": "heads have equal parts of hidden_size",
    "qwen3_omni_moe_text.num_local_experts": "a name of num_experts in other parts of the model",
    "qwen3_omni_moe_text.sliding_window": "the attention of transformers has no window",
    "qwen3_vl_moe_text.sliding_window": "transformers replaces it by None",
    "qwen3_vl_text.layer_types": "transformers attends to all positions in every layer",
    "rembert.tie_word_embeddings": "transformers never ties them",
    "siglip.vision_config.vision_use_head": "without it an image has no vector, which is refused",
    "stablelm.head_dim": "heads have equal parts of hidden_size; transformers reads it for positions alone",
    "step3p5.hidden_act": "transformers replaces it by 'silu'",
    "step3p5.use_bidirectional_attention": "refused",
    "t5gemma*.encoder.*final_logit_softcapping": "an encoder has no logits",
    "t5gemma*coder.*tie_word_embeddings": "the whole model's counts",
    "t5gemma.decoder.cross_attention_hidden_size": "transformers replaces it by the encoder's hidden_size",
    "t5gemma2.*use_bidirectional_attention": "refused; no model of transformers has it",
    "t5gemma2.eoi_token_index": "transformers replaces it by the encoder's",
    "xlm.*lang*": "embeddings of languages are refused: only one of n_langs and use_lang_emb has another value",
    "xlm.is_encoder": "it is an encoder",
    "xlstm.num_blocks": "num_hidden_layers; other numbers are refused",
    "xlstm.weight_mode": "transformers builds no model with 'fused'",
    "zamba2.hybrid_layer_ids": "follows from layers_block_type; others are refused",
    "zamba.attention_hidden_size": "twice hidden_size",
    "zaya.num_experts_per_tok": "transformers refuses others than 1",
}


def reason(line: Case, path: Path) -> str | None:
    """Why a field of a line's config keeps its value; None if it gets others."""
    names, of = f"{line.family}.{'.'.join(path)}", class_at(whole_config(line), path)
    for glob, why in FIXED.items():
        if fnmatchcase(names, glob):
            return why
    if path[-1] in of.attribute_map:
        return f"another name of {of.attribute_map[path[-1]]}"
    return None if path[-1] == "num_labels" or is_read(of, path[-1]) else "transformers does not read it"


NOT_BY_LAYER = (
    "moe_intermediate_size",
    "mlp_multipliers",
    "pos_att_type",
)  # lists that may be as long as there are layers
ABSENT = object()


@dataclass
class Draw:
    """A legal config, what was changed in the line that it began as, and what we refused, with the error."""

    line: Case
    case: Case
    changes: dict[Path, Any] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)

    def add(self, units: Sequence[dict[Path, Any]]) -> None:
        """Makes the changes, or those that are legal; those of a unit belong together."""
        if not units:
            return
        changes = {path: value for unit in units for path, value in unit.items()}
        found = changed(self.case, changes)
        is_legal, error = judged(found)
        if is_legal and error is None:
            self.case, self.changes = found, {**self.changes, **changes}
        elif len(units) == 1:
            self.refused |= dict.fromkeys(changes, error) if is_legal and error else {}
        else:
            half = len(units) // 2
            self.add(units[:half])
            self.add(units[half:])

    def effective(self) -> set[Path]:
        """The changes without which our model would be another one."""
        tree = tree_of(self.case)
        return {path for path in self.changes if self.without(path) != tree}

    def refused_by_name(self) -> set[Path]:
        """The changes that we refuse with an error that names the field."""
        return {path for path, error in self.refused.items() if re.search(rf"\b{path[-1]}\b", error)}

    def without(self, path: Path) -> Any:
        """Our config of the same draw without one change; None if there is none."""
        try:
            return tree_of(changed(self.case, {path: value_at(self.line.fields, path)}))
        except Exception:  # whatever either side says of a config that is not legal
            return None


def drawn(model_type: str, seed: int) -> Case:
    """The config of this seed."""
    return draw(model_type, seed).case


def draw(model_type: str, seed: int, among: Collection[Path] | None = None) -> Draw:
    """The config of this seed, and how it came about; `among` are the fields to change, all or half of
    them, to which some of the others come, or none; by default half of all change."""
    generator = random.Random(f"{model_type} {seed}")
    line = replace(generator.choice(lines(model_type)), name=f"drawn-{seed}")
    if is_of_text(line):
        like = [replace(line, n_prompt=generator.choice((9, 16, 24)))]
        if kind(line) == "HookedEncoder" and generator.random() < SHARE:
            like = [*(replace(like[0], auto=auto) for auto in generator.sample(CLASSES, len(CLASSES))), *like]
        line = next((other for other in like if judged(other) == (True, None)), line)
    found = Draw(line, line)
    free = [path for path in fields_read(line) if not reason(line, path)]
    known = sorted(sorted(free), key=lambda path: (path[-1] not in SIZES_FIRST, generator.random()))
    these, others = (
        (SHARE, SHARE) if among is None else (generator.choice((SHARE, 1.0)), generator.choice((0.0, SHARE / 2)))
    )
    shares = [these if path in (among or ()) else others for path in known]
    chosen = [path for path, share in zip(known, shares, strict=True) if generator.random() < share]
    found.add(values(line, chosen, generator))
    return found


def families() -> list[str]:
    """The model types that have a line in the table."""
    return sorted({case.family for case in (*CASES, *VISION_CASES)})


def lines(model_type: str) -> list[Case]:
    """The lines of a family in the table."""
    return [case for case in (*CASES, *VISION_CASES) if case.family == model_type]


def whole_config(case: Case) -> Any:
    """The config that our side reads: of a composite that is read on text alone, that of its language model."""
    return config_of(reference(case)) if is_of_text(case) else reference(case).config


def is_of_text(case: Case) -> bool:
    return kind(case) in OF_TEXT.values()


def values(line: Case, paths: Collection[Path], generator: random.Random) -> list[dict[Path, Any]]:
    """Another value for each of these fields of a line's config, together with what has to fit."""
    config = whole_config(line)
    now, found = config.to_dict() | {"num_labels": config.num_labels}, list[dict[Path, Any]]()
    for path in paths:
        beside, name = at(now, path[:-1]), path[-1]
        place = Place(class_at(config, path), beside)
        value = another(name, beside.get(name), place, generator)
        if value != beside.get(name):
            fitting = together(name, value, place, generator) if generator.random() < FITTING else {}
            found.append({path: value} | {(*path[:-1], other): fit for other, fit in fitting.items()})
            beside |= {name: value, **fitting}
    return found


def changed(case: Case, changes: Mapping[Path, Any]) -> Case:
    """The case with these fields; lists with a value for each layer are as long as there are layers."""
    fields = copy.deepcopy(case.fields)
    for path, value in changes.items():
        beside, name = at(fields, path[:-1]), path[-1]
        before = beside.get(name)
        if value is ABSENT:
            beside.pop(name, None)
        else:
            beside[name] = copy.deepcopy(value)
        if name in LAYERS and isinstance(before, int) and isinstance(value, int):
            for other, values in beside.items():
                if isinstance(values, list) and len(values) == before > 1 and other not in NOT_BY_LAYER:
                    beside[other] = of_length(values, value)
    return replace(case, fields=fields)


def of_length(values: list[Any], n: int) -> list[Any]:
    """A list with a value for each of n layers: of fewer than there were the first and the last ones."""
    return [*values[: n - 1], values[-1]] if 1 < n < len(values) else (values * n)[:n]


def at(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """The nested config at a path, which is made if it is not there."""
    for name in path:
        if not isinstance(fields.get(name), dict):
            fields[name] = {}
        fields = fields[name]
    return fields


def value_at(fields: Any, path: Path) -> Any:
    """The value of a field, ABSENT if it is not there."""
    for name in path:
        fields = fields.get(name, ABSENT) if isinstance(fields, Mapping) else ABSENT
    return fields


def class_at(config: Any, path: Path) -> type[PreTrainedConfig]:
    """The class of the config that holds a field."""
    for name in path[:-1]:
        nested = getattr(config, name, None)
        config = nested if isinstance(nested, PreTrainedConfig) else config
    return type(config)


# ---- what our side reads and says ---------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def fields_read(case: Case) -> frozenset[Path]:
    """The fields of this config that our side looks at."""
    model: Any = reference(case)
    module, config = family(case.family, kind(case)), whole_config(case)
    names = {name.removeprefix(module.PREFIX) for name in model.state_dict()}
    hf = HFConfig(config.to_dict() | {"architectures": [type(model).__name__]}, {}, names)
    module.config(hf)
    found = set(paths_read(hf))
    if ("id2label",) in found:
        found.add(("num_labels",))
    return frozenset(path for path in found if not NO_FIELDS & {*path})


def paths_read(hf: HFConfig) -> Collection[Path]:
    """The fields that were read; all of a nested config that was read as a whole."""
    found = set[Path]()
    for name in hf._read:
        value = hf._values.get(name)
        if name in hf._parts:
            found |= {(name, *path) for path in paths_read(hf._parts[name])}
        elif isinstance(value, Mapping) and name not in ("rope_parameters", "id2label"):
            nested = HFConfig(value, {})
            nested._read = {each for each in value if not any(fnmatchcase(each, glob) for glob in NO_EFFECT)}
            found |= {(name, *path) for path in paths_read(nested)}
        else:
            found.add((name,))
    return found


def tree_of(case: Case) -> Any:
    """Our config."""
    model: Any = reference(case)
    return read_config(family(case.family, kind(case)), whole_config(case), [type(model).__name__], model.state_dict())


@torch.no_grad()
def judged(case: Case) -> tuple[bool, str | None]:
    """Whether transformers makes a model of this config, and numbers of a size that can be compared; what we refuse."""
    try:
        is_empty = any(not parameter.numel() for parameter in reference(case).parameters())
    except Exception:  # whatever it says of a config that is not legal
        return False, None
    if is_empty:
        return False, None
    try:
        model, given = ours(case), inputs(case)
    except ValueError as error:
        return runs(case), str(error)
    except Exception:  # an error of ours, unless transformers has one too
        return runs(case), None
    try:
        if kind(case) == "HookedEncoder":  # which is asked without its other inputs, too
            of_transformers(case, copy.deepcopy(reference(case)), {"input_ids": given["input_ids"]})
        answers = of_transformers(case, copy.deepcopy(reference(case)), given)
    except Exception:
        return False, None
    try:
        of_ours(case, model, given, answers)
    except ValueError as error:
        return True, str(error)
    except Exception:  # an error of ours, which the comparison shows
        return True, None
    deviation = next(answers[name] for name in ("logits", "embeddings") if name in answers).std()
    has_place = "input_ids" not in given or given["input_ids"].shape[1] <= model.cfg.n_ctx
    if not (has_place and MODERATE[0] < deviation < MODERATE[1]):
        return False, None
    return is_well_conditioned(case, given, answers), None


def is_well_conditioned(case: Case, given: dict[str, Tensor], answers: Answers) -> bool:
    """Whether rounding changes what transformers answers by much less than the comparison allows for."""
    try:
        with default_dtype(torch.float64):
            truth = of_transformers(case, copy.deepcopy(reference(case)).double(), in_dtype(given, torch.float64))
    except Exception:  # not every model of transformers runs in double precision
        return True
    return all(distance(x.double(), truth[name].double()) < tolerance(x, x) / 4 for name, x in answers.items())


def runs(case: Case) -> bool:
    """Whether transformers runs a model that we refuse, on text."""
    if not is_of_text(case):
        return True
    tokens = torch.arange(2 * case.n_prompt).view(2, -1) % 37
    try:
        model: Any = copy.deepcopy(reference(case))
        model(tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}))
    except Exception:
        return False
    return True


def without_effect(name: str, seeds: int = 40) -> list[str]:
    """The fields that a family reads and that have no other value with an effect in accepted configs of these seeds.

    Left out are those for which `FIXED` has a reason, those of which we refuse each other value by name, and of models of
    images and text those of their parts, which are families themselves.
    """
    read = {path: line for line in lines(name) for path in fields_read(line)}
    if isinstance(lines(name)[0], VisionCase):
        read = {path: line for path, line in read.items() if len(path) == 1}
    left, refusals = {path for path, line in read.items() if not reason(line, path)}, Counter[Path]()
    for seed in range(seeds):
        if not left:
            break
        found = draw(name, seed, among=left)
        refusals.update(found.refused_by_name())
        refusals.update(dict.fromkeys(found.changes, -seeds))  # one that is accepted is not refused
        left -= found.effective() | {path for path, n in refusals.items() if n >= REFUSALS}
    return sorted(".".join(path) for path in left)


if __name__ == "__main__":
    for name in sys.argv[1:] or families():
        print(f"{name}: {', '.join(without_effect(name)) or 'every field has an effect'}", flush=True)
