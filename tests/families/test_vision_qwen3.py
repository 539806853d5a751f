"""Qwen3-VL and Qwen3.5 beyond what every vision-language model is asked: published configs, and what the gates would notice."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedVisionLanguage
from hooked_lm.components.blocks.block import AttentionPart
from tests.close import assert_apart, assert_close
from tests.families._models import with_tree
from tests.families._vision import VisionCase, hooked_vlm, reference, scenes, written
from tests.families.vision_qwen3 import CASES

FIRST = {family: next(case for case in CASES if case.family == family) for family in ("qwen3_vl", "qwen3_5")}
# Fields of published configs that transformers does not read, or moves.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({"dtype": "bfloat16", "bos_token_id": 1}, {}),
    "qwen3_5": (
        {
            "attn_output_gate": True,
            "full_attention_interval": 2,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_gate_type": "swish",
            "partial_rotary_factor": 0.5,
        },
        {"deepstack_visual_indexes": []},
    ),
}


def published(case: VisionCase, folder: Path, **more: object) -> Path:
    """The case's checkpoint with a config as it is published; `more` are fields of its language model."""
    reference(case).save_pretrained(folder)
    of_text, of_tower = PUBLISHED[case.family]
    text, tower = case.fields["text_config"], case.fields["vision_config"]
    rope = dict(text["rope_parameters"])
    if case.family == "qwen3_vl":
        text = {name: value for name, value in text.items() if name != "rope_parameters"}
        text = {**text, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config = {
        **case.fields,
        "architectures": [type(reference(case)).__name__],
        "model_type": case.family,
        "text_config": {"model_type": f"{case.family}_text", **text, **of_text, **more},
        "vision_config": {"model_type": case.family, **tower, **of_tower},
        "transformers_version": "4.57.0",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", FIRST.values(), ids=str)
@torch.no_grad()
def test_published_configs_are_read(case: VisionCase, tmp_path: Path) -> None:
    """The model of towers has the type of the whole there. On text alone it is the same model."""
    inputs, folder = written(case, scenes(case)["two"]), published(case, tmp_path)
    loaded = HookedVisionLanguage.from_pretrained_no_processing(folder)
    assert torch.equal(loaded(**inputs), hooked_vlm(case)(**inputs))
    of_text, ids = HookedTransformer.from_pretrained_no_processing(folder), torch.tensor([[5, 7, 9, 8]])
    assert_close(of_text(ids), loaded(ids))


@pytest.mark.parametrize(
    ("field", "value"),
    [("attn_output_gate", False), ("output_gate_type", "sigmoid"), ("mamba_ssm_dtype", "bfloat16")],
)
def test_fields_that_transformers_ignores_are_refused(field: str, value: object, tmp_path: Path) -> None:
    folder = published(FIRST["qwen3_5"], tmp_path, **{field: value})
    with pytest.raises(ValueError, match=f"transformers ignores {field}={value!r} and computes as with"):
        HookedVisionLanguage.from_pretrained_no_processing(folder)


def in_tower(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    return lambda tree: replace(tree, vision=replace(tree.vision, **change(tree.vision)))


def contiguous(tree: Any) -> Any:
    """Each axis with contiguous pairs."""
    blocks = [
        replace(block, attn=replace(block.attn, rotary=replace(block.attn.rotary, interleaved=False)))
        if isinstance(block, AttentionPart.Config)
        else block
        for block in tree.blocks
    ]
    return replace(tree, blocks=tuple(blocks))


WRONG_TREES = {
    "contiguous axes": contiguous,
    "positions of the centres of patches": in_tower(lambda t: {"pos_embed": replace(t.pos_embed, align_corners=False)}),
    "a smoother interpolation": in_tower(lambda t: {"pos_embed": replace(t.pos_embed, interpolation="bicubic")}),
    "text positions for images": lambda tree: replace(tree, rules=tree.rules[1:]),
}


@pytest.mark.parametrize("case", FIRST.values(), ids=str)
@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(case: VisionCase, wrong: str) -> None:
    model, inputs = hooked_vlm(case), written(case, scenes(case)["two"])
    assert_apart(with_tree(model, WRONG_TREES[wrong](model.tree))(**inputs)[:, -1], model(**inputs)[:, -1])
