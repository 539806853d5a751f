"""Random legal configs of encoders and encoder-decoders, from a seed: as in `_draw`, with a class of transformers drawn too
and with values for the fields that decoders do not have.
"""

import random
from dataclasses import replace
from typing import Any

import torch

from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from tests.families import CASES
from tests.families._case import Case, reference
from tests.families._draw import ACTIVATIONS, TRIES, mixed
from tests.families._encoders import of_transformers, prompt, types
from tests.families._models import MODERATE

HEADS = ("num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
WIDTHS = ("hidden_size", "dim", "d_model")
MLP_WIDTHS = ("intermediate_size", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
DEPTHS = ("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
ACTS = ("activation", "conv_act", "classifier_activation", "pooler_hidden_act")
FULL, LOCAL = "full_attention", "sliding_attention"
STRETCHED = {
    FULL: {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 16},
    LOCAL: {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
}
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(HEADS, (1, 2, 4, 8)),
    **dict.fromkeys(WIDTHS, (24, 32, 48)),
    **dict.fromkeys(MLP_WIDTHS, (24, 40, 56)),
    **dict.fromkeys(DEPTHS, (1, 2, 3)),
    **dict.fromkeys(ACTS, ACTIVATIONS),
    "feed_forward_proj": (*ACTIVATIONS, *(f"gated-{act}" for act in ACTIVATIONS)),
    "max_position_embeddings": (30, 40, 64),
    "num_labels": (1, 2, 3, 5),
    "embedding_size": (12, 32, 40),
    "type_vocab_size": (0, 1, 2, 3),
    # ALBERT
    "num_hidden_groups": (1, 2, 3),
    "inner_group_num": (1, 2),
    # ModernBERT, ESM
    "local_attention": (1, 4, 5, 9),
    "layer_types": ([LOCAL, LOCAL, FULL], [FULL, LOCAL, FULL], [FULL] * 3, [LOCAL]),
    "rope_parameters": (STRETCHED, {FULL: STRETCHED[LOCAL], LOCAL: STRETCHED[FULL]}),
    "classifier_pooling": ("cls", "mean"),
    "position_embedding_type": ("absolute", "rotary"),
    # DeBERTa
    "pos_att_type": (["c2p"], ["p2c"], ["c2p", "p2c"], "c2p|p2c", []),
    "norm_rel_ebd": ("none", "layer_norm"),
    "position_buckets": (-1, 3, 6),
    "max_relative_positions": (-1, 5, 12),
    "attention_head_size": (4, 8, 12),
    "conv_kernel_size": (0, 3, 5),
    "conv_groups": (1, 2, 4),
    # ConvBERT, SqueezeBERT, MobileBERT
    "head_ratio": (1, 2, 4),
    **dict.fromkeys(("num_groups", "q_groups", "k_groups", "v_groups"), (1, 2, 4)),
    **dict.fromkeys(("post_attention_groups", "intermediate_groups", "output_groups"), (1, 2, 8)),
    "num_feedforward_networks": (1, 2, 4),
    "intra_bottleneck_size": (8, 16, 24),
    # BigBird, and what tokens have beside types
    "block_size": (1, 2, 3),
    "num_random_blocks": (1, 2),
    "max_2d_position_embeddings": (5, 30),
    "type_vocab_sizes": ([3, 2, 4], [2, 5, 3, 2]),
    **dict.fromkeys(("shape_embed_dim", "pronunciation_embed_dim"), (4, 12, 20)),
    # T5, LongT5 and Switch
    "encoder_attention_type": ("local", "transient-global"),
    "local_radius": (1, 3, 20),
    "global_block_size": (2, 4, 8),  # of others transformers rounds the sum of their reciprocals
    "relative_attention_num_buckets": (4, 8, 14, 32),
    "relative_attention_max_distance": (9, 12, 128),
    "d_kv": (4, 8, 12),
    "num_experts": (2, 4, 5),
    "expert_capacity": (1, 3, 64),
    "num_sparse_encoder_layers": (0, 1, 2, 3),
    "num_sparse_decoder_layers": (0, 1, 2, 3),
    # Marian
    "decoder_vocab_size": (37, 53),
}
PADS = (0, 1)  # where pad tokens have a place of their own among the positions


def drawn(model_type: str, seed: int) -> Case:
    """The config of this seed, for one of the classes of transformers that the family's lines have."""
    generator = random.Random(f"{model_type} {seed}")
    lines = [case for case in CASES if case.family == model_type]
    for _ in range(TRIES):
        line, of = generator.choice(lines), generator.choice(lines)
        fields = varied(of, mixed(line, lines, generator), generator)
        n_prompt = generator.choice((9, 16, 24))
        case = replace(of, name=f"drawn-{seed}", fields=fields, n_prompt=n_prompt)
        if runs_in_transformers(case) and is_accepted(case) and is_moderate(case):
            return case
    raise AssertionError(
        f"no legal config of {model_type} in {TRIES} draws: say more in tests/families/_draw_encoders.py"
    )


def varied(line: Case, fields: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """These fields with some of the values above, of those that configs of this line's class have."""
    known = fields_known(line)
    for name, values in VALUES.items():
        if name in known and generator.random() < 0.25:
            fields[name] = generator.choice(values)
    if "pad_token_id" in known and generator.random() < 0.25:
        fields["pad_token_id"] = generator.choice(PADS)
    return fields


def fields_known(line: Case) -> set[str]:
    """The fields of this line's config, and those that our side looks at besides; pad tokens where we look at them."""
    model: Any = reference(line)
    values, module = model.config.to_dict(), family(line.family)
    hf = HFConfig(values, {}, {name.removeprefix(module.PREFIX) for name in model.state_dict()})
    module.config(hf)
    labels = {"num_labels"} if "id2label" in hf._read else set()
    return (values.keys() - {"pad_token_id"}) | hf._read | labels


@torch.no_grad()
def runs_in_transformers(case: Case) -> bool:
    """Whether transformers makes a model of this config and runs it."""
    tokens = torch.randint(4, 37, (3, case.n_prompt), generator=torch.Generator().manual_seed(4))
    try:
        model: Any = reference(case)
        model(tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}))
    except Exception:  # whatever it says of a config that is not legal
        return False
    return True


def is_accepted(case: Case) -> bool:
    """Whether we take this config and the case's prompt, instead of saying why not."""
    model: Any = reference(case)
    try:
        tree = read_config(family(case.family), model.config, [type(model).__name__], model.state_dict())
    except ValueError:
        return False
    return case.n_prompt <= tree.n_ctx


@torch.no_grad()
def is_moderate(case: Case) -> bool:
    """Whether what transformers says has a size at which differences say something, with token types and without."""
    model: Any = reference(case)
    tokens = prompt(case)
    if model.config.is_encoder_decoder:
        found = [model(tokens, decoder_input_ids=tokens % 37).logits.std() / nearly for nearly in (0.8, 1.2)]
    else:
        outputs = [of_transformers(model, tokens, **inputs) for inputs in ({}, types(case, tokens))]
        found = [out.get("logits", out.get("embeddings")).std() for out in outputs]
    return all(MODERATE[0] < deviation < MODERATE[1] for deviation in found)
