"""Recent decoders with experts where transformers or published checkpoints deviate."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, DbrxForCausalLM

from hooked_lm import pretrained
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES, Case, reference
from tests.families._models import hooked, logits_of, prompt
from tests.families.recent_moe import DBRX, HUNYUAN


def by_name(name: str) -> Case:
    return next(case for case in DECODER_CASES if str(case) == name)


def tree_of(model_type: str, fields: dict[str, Any]) -> DecoderConfig:
    return read_config(family(model_type), CONFIG_MAPPING[model_type](**copy.deepcopy(fields)))


@torch.no_grad()
def test_the_rotary_base_of_dbrx_is_that_of_its_attention():
    """`DbrxConfig` of transformers (configuration_dbrx.py) does not read it and uses 10,000."""
    case = by_name("dbrx-grouped-clipped")
    theirs, tokens = copy.deepcopy(reference(case)), prompt(case)
    theirs.config.attn_config.rope_theta = 500.0
    found = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)(tokens)
    config = copy.deepcopy(theirs.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    right = DbrxForCausalLM(config).eval()
    right.load_state_dict(theirs.state_dict())
    assert_close(found, right(tokens).logits)
    assert_apart(found, logits_of(case, tokens))


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("attn_config", {"rope_theta": 100.0}, "rope_theta=100.0 of attn_config differs"),
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights=2.0 is not supported"),
        ("ffn_config", {"field_of_tomorrow": 4}, "{'field_of_tomorrow': 4}"),
    ],
)
def test_parts_of_dbrx_that_are_refused(part: str, fields: dict[str, Any], message: str):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    accepted = {"attn_config": {**DBRX["attn_config"], "rope_theta": 500.0}, "ffn_config": DBRX["ffn_config"]}
    tree_of("dbrx", {**DBRX, **rope, **accepted})
    with pytest.raises(ValueError, match=re.escape(message)):
        tree_of("dbrx", {**DBRX, **rope, **accepted, part: {**accepted[part], **fields}})


def test_hunyuans_shared_expert_has_the_width_of_the_others():
    """transformers reads neither field."""
    tree_of("hunyuan_v1_moe", {**HUNYUAN, "num_shared_expert": [1, 1], "moe_intermediate_size": [48, 48]})
    for field, value in (("num_shared_expert", [1, 2]), ("moe_intermediate_size", 20)):
        with pytest.raises(ValueError, match=field):
            tree_of("hunyuan_v1_moe", {**HUNYUAN, field: value})


@torch.no_grad()
def test_an_axk1_without_corrections(tmp_path: Path):
    """Published checkpoints have none, and norms after dense layers that are not used."""
    case = by_name("axk1-groups")
    theirs, tokens = copy.deepcopy(reference(case)), prompt(case)
    corrections = [buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 1
    corrections[0].zero_()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if not name.endswith("e_score_correction_bias")}
    save_file({**tensors, "model.layers.0.post_mlp_layernorm.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert model.blocks[1].mlp.b_choice is None
    assert_close(model(tokens), theirs(tokens).logits)
    assert_apart(model(tokens), hooked(case)(tokens))
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(("model_type", "field"), [("mellum", "mlp_layer_types"), ("granitemoehybrid", "layer_types")])
def test_unknown_types_of_layers(model_type: str, field: str):
    config = CONFIG_MAPPING[model_type](num_hidden_layers=2)
    setattr(config, field, [getattr(config, field)[0], "lazy"])
    with pytest.raises(ValueError, match=rf"{field} \['lazy'\] are not supported"):
        read_config(family(model_type), config)


def test_zero_experts_are_refused_where_experts_are_needed():
    theirs = copy.deepcopy(reference(by_name("mixtral-grouped")))
    theirs.config.num_local_experts = 0
    with pytest.raises(ValueError, match="n_experts=0"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)
