"""Language models of composites: how their files may be written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MllamaForCausalLM

from hooked_lm import pretrained
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from tests.close import assert_apart, assert_close
from tests.families import composites
from tests.families._case import Case, reference
from tests.families._models import assert_same_tensors, hooked, prompt

QWEN = {str(case): case for case in composites.CASES if case.family == "qwen3_vl_moe_text"}
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def written(case: Case, folder: Path, turned: tuple[str, ...]) -> Path:
    """The case's checkpoint in a folder, with the experts of these names turned."""
    reference(case).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {n: x.mT.contiguous() if n.endswith(turned) else x for n, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", QWEN.values(), ids=str)
@torch.no_grad()
def test_experts_as_published_and_as_saved_again(case: Case, tmp_path: Path) -> None:
    """Also where one of their tensors has the same shape in both layouts: experts are as wide as the stream, or half as wide."""
    expected = dict(hooked(case).named_parameters())
    for name, turned in (("published", EXPERTS), ("again", ("no tensor",))):
        model = pretrained.from_pretrained_no_processing(written(case, tmp_path / name, turned))
        assert model.cfg.tree.layout == (name == "again")
        assert_same_tensors(dict(model.named_parameters()), expected)


@torch.no_grad()
def test_transformers_reads_such_files_where_shapes_differ(tmp_path: Path) -> None:
    case = QWEN["qwen3_vl_moe_text-axes"]
    theirs = type(reference(case)).from_pretrained(written(case, tmp_path, EXPERTS)).eval()
    again = {name: x for name, x in theirs.state_dict().items() if name.endswith(EXPERTS)}
    assert again
    assert all(torch.equal(x, reference(case).state_dict()[name]) for name, x in again.items())


def test_experts_in_both_layouts_are_refused(tmp_path: Path) -> None:
    folder = written(QWEN["qwen3_vl_moe_text-axes"], tmp_path, EXPERTS[:1])
    with pytest.raises(ValueError, match=r"\[expert, in, out\], and those of others \[expert, out, in\]"):
        pretrained.from_pretrained_no_processing(folder)


@torch.no_grad()
def test_wrong_experts_are_noticed() -> None:
    case = QWEN["qwen3_vl_moe_text-dense-first-tied-experts-as-wide-as-the-stream"]
    model = hooked(case)
    before = model(prompt(case))
    W_out = model.blocks[1].mlp.experts[0].W_out
    kept = W_out.clone()
    W_out.copy_(kept.mT)
    assert_apart(model(prompt(case)), before)
    W_out.copy_(kept)


@torch.no_grad()
def test_the_generator_of_cosmos_is_left_out(tmp_path: Path) -> None:
    """Its weights are in the layers of the language model."""
    case = next(case for case in composites.CASES if case.family == "cosmos3_edge_text")
    file = written(case, tmp_path, ("no tensor",)) / "model.safetensors"
    tensors = load_file(file)
    assert "layers.0.self_attn.to_q.weight" in tensors
    generator = ("self_attn.add_q_proj.weight", "self_attn.norm_added_k.weight", "mlp_moe_gen.up_proj.weight")
    tensors |= {f"layers.1.{name}": torch.ones(4, 4) for name in generator} | {"norm_moe_gen.weight": torch.ones(4)}
    save_file(tensors, file, metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert_same_tensors(dict(model.named_parameters()), dict(hooked(case).named_parameters()))
    assert model.cfg.left_out["layers.1.self_attn.add_q_proj"] == 1


MLLAMA = next(case for case in composites.CASES if str(case) == "mllama_text_model-two-between")
ERNIE = next(case for case in composites.CASES if str(case) == "ernie4_5_vl_moe_text-axes")


def test_what_only_images_use_is_left_out() -> None:
    assert hooked(MLLAMA).cfg.left_out["language_model.model.layers.{1-2}"] == 2 * 13
    assert hooked(ERNIE).cfg.left_out["model.layers.1.mlp.experts.{4-7}"] == 4 * 3
    assert hooked(ERNIE).cfg.left_out["model.layers.1.mlp.gate.weight_1"] == 1


def test_the_choice_of_experts_for_images_is_not_read(tmp_path: Path) -> None:
    """Corrections of both choices are in one tensor, those of text first."""
    file = written(ERNIE, tmp_path, ("no tensor",)) / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    tensors[name] = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0]])
    save_file(tensors, file, metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert model.blocks[1].mlp.b_choice.tolist() == [3.0, 1.0, 0.0, 0.0]
    _, cache = model.run_with_cache(prompt(ERNIE), names_filter="blocks.1.mlp.hook_expert_indices")
    assert set(cache["blocks.1.mlp.hook_expert_indices"].flatten().tolist()) == {0, 1}
    model.cfg.left_out = None
    with pytest.raises(ValueError, match="no class for a ernie4_5_vl_moe_text alone"):
        model.to_hf()


@torch.no_grad()
def test_tokens_that_are_read_and_not_predicted() -> None:
    """The token of an image has an embedding, as in transformers."""
    model, tokens = hooked(MLLAMA), torch.tensor([[1, 61, 68, 7]])
    assert (model.cfg.d_vocab, model.cfg.d_vocab_out) == (69, 61)
    assert_close(model(tokens), reference(MLLAMA)(input_ids=tokens).logits)


@torch.no_grad()
def test_a_language_model_alone_may_have_parts_for_images(tmp_path: Path) -> None:
    theirs = MllamaForCausalLM._from_config(reference(MLLAMA).config.text_config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert model.cfg.left_out == {"model.layers.{1-2}": 26}
    assert_close(model(prompt(MLLAMA)), theirs(prompt(MLLAMA)).logits)


def test_embeddings_as_published_and_as_saved_again(tmp_path: Path) -> None:
    """Those of tokens for images are in a tensor of their own; transformers writes halves."""
    case = next(case for case in composites.CASES if case.family == "molmo2_text")
    file = written(case, tmp_path, ("no tensor",)) / "model.safetensors"
    tensors, names = load_file(file), [f"model.transformer.wte.{part}" for part in ("embedding", "new_embedding")]
    assert [len(tensors[name]) for name in names] == [34, 34]
    published = dict(zip(names, torch.cat([tensors[name] for name in names]).split([61, 7]), strict=True))
    save_file({**tensors, **{name: x.clone() for name, x in published.items()}}, file, metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert_same_tensors(dict(model.named_parameters()), dict(hooked(case).named_parameters()))
    save_file({name: x for name, x in tensors.items() if name != names[1]}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        pretrained.from_pretrained_no_processing(tmp_path)


def test_groups_of_experts_need_a_number() -> None:
    fields = {**composites.DEEPSEEK_OCR, "topk_method": "group_limited_greedy", "n_group": None}
    config = CONFIG_MAPPING["deepseek_ocr2_text"](**fields)
    with pytest.raises(ValueError, match="needs n_group and topk_group, which are None, 2"):
        read_config(family("deepseek_ocr2_text"), config)
