"""Checkpoints that nobody can load: errors name the field and its value, before anything large is made."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_lm import HookedTransformer, pretrained
from tests.families import CASES, reference
from tests.families._models import hooked
from tests.families.random_configs import changed

# The fields of some families: layers, heads, width, epsilon.
FAMILIES = {
    "gpt2-tied": ("n_layer", "n_head", "n_embd", "layer_norm_epsilon"),
    "llama-grouped": ("num_hidden_layers", "num_attention_heads", "hidden_size", "rms_norm_eps"),
    "gpt_neox-parallel": ("num_hidden_layers", "num_attention_heads", "hidden_size", "layer_norm_eps"),
    "bloom": ("n_layer", "n_head", "hidden_size", "layer_norm_epsilon"),
}
BAD: list[tuple[int, Any]] = [
    *((0, value) for value in (0, -3, 10**12, 100_000, 2.5, "twelve", True)),
    *((1, value) for value in (0, -2, 10**30, [4])),
    *((2, value) for value in (-8, 0, 2**62, "wide")),
    *((3, value) for value in (float("nan"), float("inf"), -1e-5, "small")),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, known = tmp_path_factory.mktemp("checkpoints"), {str(case): case for case in CASES}
    found = {name: name if name in known else next(n for n in known if n.startswith(name.partition("-")[0]))
             for name in FAMILIES}  # fmt: skip
    for name in FAMILIES:
        reference(known[found[name]]).save_pretrained(folder / name)
    return {name: folder / name for name in FAMILIES}


def damaged(source: Path, target: Path, **fields: Any) -> Path:
    target.mkdir()
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


@pytest.mark.parametrize(("which", "value"), BAD)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_that_no_model_has(
    name: str, which: int, value: Any, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    field = FAMILIES[name][which]
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}"[:20])) as caught:
        pretrained.from_pretrained(damaged(checkpoints[name], tmp_path / "bad", **{field: value}))
    assert "must be" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("mistral", "sliding_window"),
        ("gemma3_text", "sliding_window"),
        ("gpt_neo", "window_size"),
        ("t5gemma", "decoder.sliding_window"),
        ("glm4_moe", "topk_group"),
        ("glm4_moe", "n_group"),
        ("axk2", "topk_group"),
        ("dots1", "num_experts_per_tok"),
        ("hunyuan_v1_moe", "moe_topk"),
        ("deepseek_v32", "index_topk"),
        ("albert", "num_hidden_groups"),
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_of_none_is_refused_by_its_name(name: str, path: str, value: int) -> None:
    """Before, such models loaded, and failed in a run or had other logits than in transformers."""
    line = next(case for case in CASES if case.family == name)
    case = changed(replace(line, name="none"), {tuple(path.split(".")): value})
    with pytest.raises(ValueError, match=rf"{path}={value} in this {name} config must be a whole number of at least 1"):
        hooked(case)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dots1", {"sliding_window": 0, "layer_types": ["full_attention"] * 3}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 0, "topk_group": 0}),
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    ],
)
def test_a_count_of_none_without_effect_is_accepted(name: str, fields: dict[str, Any]) -> None:
    line = next(case for case in CASES if case.family == name)
    assert hooked(replace(line, name="without", fields={**line.fields, **fields}))


@pytest.mark.parametrize("name", FAMILIES)
def test_more_layers_than_the_file_has(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """No module of them is made."""
    field = FAMILIES[name][0]
    n_held = json.loads((checkpoints[name] / "config.json").read_text())[field]
    fields = {field: 9_000}
    if name == "llama-grouped":
        fields |= {"layer_types": None}
    with pytest.raises(ValueError, match=f"9000 layers .* holds tensors of {n_held}"):
        pretrained.from_pretrained(damaged(checkpoints[name], tmp_path / "bad", **fields))


def test_encoder_decoders_and_options(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"n_layer=0 .*must be"):
        pretrained.from_pretrained(checkpoints["gpt2-tied"], n_layer=0)
    with pytest.raises(ValueError, match="rope_theta=nan"):
        pretrained.from_pretrained(checkpoints["llama-grouped"], rope_theta=float("nan"))


def test_sizes_whose_product_no_memory_has(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    wide = {"n_embd": 2**30, "n_head": 2**15, "vocab_size": 2**31 - 1, "n_inner": 2**31 - 1}
    with pytest.raises(ValueError, match=r"d_model=1073741824|expected"):
        pretrained.from_pretrained(damaged(checkpoints["gpt2-tied"], tmp_path / "bad", **wide))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_deeply_nested_json(file: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(checkpoints["gpt2-tied"], tmp_path / "bad")
    if file.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / file).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match=file):
        pretrained.from_pretrained(folder)


@pytest.mark.parametrize("n_bytes", [0, 4, 8, 40])
def test_truncated_headers(n_bytes: int, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(checkpoints["gpt2-tied"], tmp_path / "bad")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(whole[:n_bytes])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        pretrained.from_pretrained(folder)


def test_a_config_in_flat_names(tmp_path: Path) -> None:
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 4, "d_vocab": 7, "act_fn": "relu"}
    model = HookedTransformer({**sizes, "normalization_type": "LN"})
    torch.save(model.state_dict(), tmp_path / "model_final.pth")
    for field, value in {"n_layers": 0, "n_heads": -1, "eps": float("nan"), "d_model": "wide"}.items():
        fields = {**sizes, "normalization_type": "LN", field: value}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            pretrained.from_pretrained(tmp_path)


def test_a_good_checkpoint_loads_after_all(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The control of the tests above."""
    for name, folder in checkpoints.items():
        model = pretrained.from_pretrained(damaged(folder, tmp_path / name))
        assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
    tensors = load_file(checkpoints["gpt2-tied"] / "model.safetensors")
    save_file(tensors, tmp_path / "copy.safetensors")
