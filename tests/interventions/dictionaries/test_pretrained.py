"""Published dictionaries by release and id, in a cache of the hub and in folders that are written here."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hooked_lm.interventions.dictionaries import JumpReLU, Normalized, load, load_llama_scope, published, releases
from hooked_lm.interventions.dictionaries.published import Published, canonical, locate
from tests.close import assert_close

D, WIDTH = 6, 10


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def in_cache(cache: Path, repository: str, revision: str = "main") -> Path:
    """The folder of a repository's files in a cache of the hub."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text("0" * 40)
    (home / "snapshots" / ("0" * 40)).mkdir(parents=True, exist_ok=True)
    return home / "snapshots" / ("0" * 40)


def write_saelens(folder: Path, **cfg: Any) -> dict[str, Tensor]:
    folder.mkdir(parents=True)
    sizes = {"W_enc": (D, WIDTH), "W_dec": (WIDTH, D), "b_enc": (WIDTH,), "b_dec": (D,)}
    tensors = {name: numbers(*shape) for name, shape in sizes.items()}
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"d_in": D, "d_sae": WIDTH, **cfg}))
    return tensors


def write_gemma_scope(folder: Path) -> dict[str, Tensor]:
    folder.mkdir(parents=True)
    sizes = {"W_enc": (D, WIDTH), "W_dec": (WIDTH, D), "b_enc": (WIDTH,), "b_dec": (D,), "threshold": (WIDTH,)}
    tensors = {name: numbers(*shape).abs() for name, shape in sizes.items()}
    np.savez(folder / "params.npz", **{name: value.numpy() for name, value in tensors.items()})
    return tensors


def test_a_release_of_saelens_is_found_in_the_cache(tmp_path: Path) -> None:
    site = "blocks.8.hook_resid_pre"
    folder = in_cache(tmp_path, "jbloom/GPT2-Small-SAEs-Reformatted") / site
    tensors = write_saelens(folder, hook_point=site, activation_fn_str="relu")
    sae = load("gpt2-small-res-jb", site, cache_dir=tmp_path)
    x = numbers(4, D)
    assert_close(sae.encode(x), ((x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]).relu())
    assert (sae.cfg.hook_point, sae.training) == (site, False)
    assert_close(load("jbloom/GPT2-Small-SAEs-Reformatted", site, cache_dir=tmp_path).W_enc, sae.W_enc)
    assert_close(load(folder.parent, site).W_enc, sae.W_enc)
    with pytest.raises(ValueError, match="give the id of one"):
        load("gpt2-small-res-jb")
    with pytest.raises(ValueError, match=r"'blocks.9.hook_resid_pre' of .* has none of cfg.json, params.npz"):
        load("gpt2-small-res-jb", "blocks.9.hook_resid_pre", cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"the hub did not give .* of 'jbloom/GPT2-Small-OAI-v5-32k-mlp-out-SAEs'"):
        load("gpt2-small-mlp-out-v5-32k", "blocks.3.hook_mlp_out", cache_dir=tmp_path)


def test_a_revision_is_that_of_the_cache(tmp_path: Path) -> None:
    folder = in_cache(tmp_path, "someone/saes", "v2")
    write_saelens(folder / "a", architecture="standard", normalize_activations="layer_norm")
    assert isinstance(load("someone/saes", "a", cache_dir=tmp_path, revision="v2"), Normalized)
    with pytest.raises(ValueError, match="the hub did not give"):
        load("someone/saes", "a", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("repository", "site"),
    [
        ("gemma-scope-2b-pt-res", "blocks.5.hook_resid_post"),
        ("gemma-scope-9b-pt-mlp", "blocks.5.hook_mlp_out"),
        ("gemma-scope-2b-pt-att", "blocks.5.attn.hook_z"),
    ],
)
def test_gemma_scope_and_its_canonical_ids(repository: str, site: str, tmp_path: Path) -> None:
    files = in_cache(tmp_path, f"google/{repository}")
    for l0 in (18, 68, 290):
        tensors = write_gemma_scope(files / f"layer_5/width_16k/average_l0_{l0}")
        if l0 == 68:
            expected = tensors
    sae = load(f"{repository}-canonical", "layer_5/width_16k/canonical", cache_dir=tmp_path)
    x = numbers(4, D)
    hidden = x @ expected["W_enc"] + expected["b_enc"]
    features = hidden * (hidden > expected["threshold"])
    assert_close(sae.encode(x), features)
    assert_close(sae(x), features @ expected["W_dec"] + expected["b_dec"])
    assert isinstance(sae, JumpReLU)
    assert sae.cfg.hook_point == site
    by_id = load(repository, "layer_5/width_16k/average_l0_290", cache_dir=tmp_path)
    assert_close(by_id.W_enc, tensors["W_enc"])
    assert_close(load(files, "layer_5/width_16k/canonical").W_enc, expected["W_enc"])
    with pytest.raises(ValueError, match="there is no folder layer_6/width_16k/average_l0_"):
        load(f"{repository}-canonical", "layer_6/width_16k/canonical", cache_dir=tmp_path)


def test_canonical_is_refused_where_two_are_as_close() -> None:
    files = [f"layer_0/width_16k/average_l0_{n}/params.npz" for n in (64, 136)]
    with pytest.raises(ValueError, match="average_l0_64 or layer_0/width_16k/average_l0_136"):
        canonical("layer_0/width_16k/canonical", files)


def test_gemma_scope_refuses_what_has_another_scale(tmp_path: Path) -> None:
    for name in ("gemma-scope-2-1b-pt/clt/layer_1/x", "gemma-scope-2b-pt-res/embedding/width_4k"):
        write_gemma_scope(tmp_path / name)
        with pytest.raises(ValueError, match="of Gemma Scope is not understood"):
            load(tmp_path / name)
    write_gemma_scope(tmp_path / "unnamed")
    assert load(tmp_path / "unnamed").cfg.hook_point is None


def test_transcoders_of_gemma_scope_read_the_norm_before_its_weight(tmp_path: Path) -> None:
    tensors = write_gemma_scope(tmp_path / "gemma-scope-2b-pt-transcoders/layer_1/x")
    sae = load(tmp_path / "gemma-scope-2b-pt-transcoders/layer_1/x")
    assert (sae.cfg.hook_point, sae.cfg.hook_point_out) == ("blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out")
    assert_close(sae.W_enc, tensors["W_enc"])
    folder = tmp_path / "gemma-scope-2-1b-pt/transcoder_all/layer_2_width_16k"
    folder.mkdir(parents=True)
    skip = numbers(D, D)
    save_file(
        {**{name.lower(): of for name, of in tensors.items()}, "affine_skip_connection": skip},
        folder / "params.safetensors",
    )
    sae = load(folder)
    assert (sae.cfg.hook_point, sae.cfg.hook_point_out) == ("blocks.2.mlp.hook_in", "blocks.2.hook_mlp_out")
    x = numbers(4, D)
    assert_close(sae(x), sae.encode(x) @ tensors["W_dec"] + tensors["b_dec"] + x @ skip)


def test_gemma_scope_2_has_safetensors(tmp_path: Path) -> None:
    folder = in_cache(tmp_path, "google/gemma-scope-2-1b-pt") / "attn_out/layer_13_width_16k_l0_small"
    folder.mkdir(parents=True)
    sizes = {"w_enc": (D, WIDTH), "w_dec": (WIDTH, D), "b_enc": (WIDTH,), "b_dec": (D,), "threshold": (WIDTH,)}
    tensors = {name: numbers(*shape) for name, shape in sizes.items()}
    save_file(tensors, folder / "params.safetensors")
    sae = load("gemma-scope-2-1b-pt-att", "layer_13_width_16k_l0_small", cache_dir=tmp_path)
    assert sae.cfg.hook_point == "blocks.13.attn.hook_z"
    assert_close(sae.W_enc, tensors["w_enc"])
    save_file({**tensors, "affine_skip_connection": numbers(D, D)}, folder / "params.safetensors")
    with pytest.raises(ValueError, match="affine_skip_connection is not understood"):
        load(folder)


def test_llama_scope_has_the_scale_of_its_inputs(tmp_path: Path) -> None:
    folder = in_cache(tmp_path, "fnlp/Llama3_1-8B-Base-LXR-8x") / "Llama3_1-8B-Base-L15R-8x"
    (folder / "checkpoints").mkdir(parents=True)
    sizes = {"encoder.weight": (WIDTH, D), "decoder.weight": (D, WIDTH), "encoder.bias": (WIDTH,), "decoder.bias": (D,)}
    tensors = {name: numbers(*shape) for name, shape in sizes.items()}
    save_file(tensors, folder / "checkpoints/final.safetensors")
    site = "blocks.15.hook_resid_post"
    cfg = {"d_model": D, "d_sae": WIDTH, "jump_relu_threshold": 0.3, "hook_point_in": site, "act_fn": "jumprelu"}
    cfg["dataset_average_activation_norm"] = {"in": 0.7, "out": 0.7}
    (folder / "hyperparams.json").write_text(json.dumps(cfg))
    sae = load("llama_scope_lxr_8x", "l15r_8x", cache_dir=tmp_path)
    norm, x = D**0.5 / 0.7, numbers(4, D)
    hidden = norm * x @ tensors["encoder.weight"].T + tensors["encoder.bias"]
    features = hidden * (hidden > 0.3 * norm)
    assert_close(sae.encode(x), features)
    assert_close(sae(x), (features @ tensors["decoder.weight"].T + tensors["decoder.bias"]) / norm)
    assert sae.cfg.hook_point == site
    for wrong in ({"act_fn": "topk"}, {"hook_point_out": "blocks.15.hook_mlp_out"}):
        (folder / "hyperparams.json").write_text(json.dumps(cfg | wrong))
        with pytest.raises(ValueError, match=next(iter(wrong.values())) + "'"):
            load_llama_scope(folder)


@pytest.mark.parametrize(
    ("release", "sae_id", "where"),
    [
        ("gpt2-small-resid-post-v5-32k", "blocks.3.hook_resid_post",
         "jbloom/GPT2-Small-OAI-v5-32k-resid-post-SAEs v5_32k_layer_3.pt"),
        ("gpt2-small-attn-out-v5-128k", "blocks.3.hook_attn_out", "jbloom/GPT2-Small-OAI-v5-128k-attn-out-SAEs v5_128k_layer_3"),
        ("pythia-70m-deduped-res-sm", "blocks.0.hook_resid_pre", "ctigges/pythia-70m-deduped__res-sm_processed e-res-sm"),
        ("pythia-70m-deduped-mlp-sm", "blocks.4.hook_mlp_out", "ctigges/pythia-70m-deduped__mlp-sm_processed 4-mlp-sm"),
        ("gemma-scope-2-4b-it-res-all", "layer_0_width_16k_l0_big",
         "google/gemma-scope-2-4b-it resid_post_all/layer_0_width_16k_l0_big"),
        ("llama_scope_lxm_32x", "l0m_32x", "fnlp/Llama3_1-8B-Base-LXM-32x Llama3_1-8B-Base-L0M-32x"),
    ],
)  # fmt: skip
def test_rules_of_releases(release: str, sae_id: str, where: str) -> None:
    assert locate(release, sae_id) == Published(*where.split())
    assert release in releases()


def test_unknown_releases_and_ids_are_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no release 'gpt2-small-res-jp' is known.*did you mean 'gpt2-small-res-jb'"):
        load("gpt2-small-res-jp", "blocks.8.hook_resid_pre")
    with pytest.raises(
        ValueError, match=r"'llama_scope_lxr_8x' has no dictionary 'l15m_8x': its ids match l\(\\d\+\)r_"
    ):
        load("llama_scope_lxr_8x", "l15m_8x")


def test_the_table_of_saelens_is_read_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sae_lens"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nobody imports this')")
    row = "{id: blocks.0.x, path: files/zero, norm_scaling_factor: 0.25}"
    overrides = "{normalize_activations: expected_average_only_in}"
    (package / published.TABLE).write_text(
        f"new-release:\n  repo_id: someone/saes\n  config_overrides: {overrides}\n  saes: [{row}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    published._table_of_saelens.cache_clear()
    try:
        assert isinstance(published, ModuleType)
        assert "new-release" in releases()
        tensors = write_saelens(in_cache(tmp_path, "someone/saes") / "files/zero", architecture="standard")
        sae = load("new-release", "blocks.0.x", cache_dir=tmp_path)
        assert_close(sae.W_enc, 0.25 * tensors["W_enc"])
        assert_close(sae.W_dec, tensors["W_dec"] / 0.25)
        with pytest.raises(ValueError, match=r"no dictionary 'blocks\.1\.x', but 1 others, such as blocks\.0\.x"):
            load("new-release", "blocks.1.x")
        assert "sae_lens" not in sys.modules
    finally:
        published._table_of_saelens.cache_clear()
