"""Dictionaries in files: ours bit for bit, and those of two other libraries, written here by hand."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooked_lm.interventions.dictionaries import (
    SAE,
    BatchTopK,
    Gated,
    JumpReLU,
    Normalized,
    TopK,
    Transcoder,
    load,
    load_dictionary_learning,
    load_saelens,
    save_saelens,
)  # fmt: skip
from tests.close import assert_close

D, WIDTH, K = 6, 10, 3
CONFIGS = [
    SAE.Config(D, WIDTH, hook_point="blocks.0.hook_resid_post"),
    TopK.Config(D, WIDTH, k=K),
    BatchTopK.Config(D, WIDTH, k=K),
    JumpReLU.Config(D, WIDTH, subtract_b_dec=False),
    Gated.Config(D, WIDTH),
    Transcoder.Config(D, WIDTH, d_out=4, hook_point="blocks.0.mlp.hook_in", hook_point_out="blocks.0.hook_mlp_out"),
]


def kind_of(cfg: SAE.Config) -> str:
    return cfg.build().kind


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def filled(cfg: SAE.Config) -> SAE:
    sae = cfg.build()
    with torch.no_grad():
        for name, weight in sae.state_dict().items():
            weight.copy_(numbers(*weight.shape).abs() if name == "threshold" else numbers(*weight.shape))
    return sae.eval()


def assert_same(one: Any, other: Any) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


# ---- ours ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", CONFIGS, ids=kind_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_come_back_bit_for_bit(cfg: SAE.Config, dtype: torch.dtype, tmp_path: Path) -> None:
    sae = filled(cfg).to(dtype)
    sae.save(tmp_path / "sae.safetensors")
    for again in (load(tmp_path / "sae.safetensors"), type(sae).load(tmp_path / "sae.safetensors")):
        assert_same(again, sae)
    again = SAE.load(tmp_path / "sae.safetensors")
    other = Gated if type(sae) is TopK else TopK
    if not isinstance(sae, other):
        with pytest.raises(ValueError, match=f"holds a {type(sae).__name__}, not a {other.__name__}"):
            other.load(tmp_path / "sae.safetensors")
    assert type(again) is type(sae)
    assert again.cfg == cfg
    assert not again.training
    assert not any(weight.requires_grad for weight in again.parameters())


def test_normalized_ones_come_back(tmp_path: Path) -> None:
    sae, x = Normalized(filled(CONFIGS[0]), "layer_norm"), 5 * numbers(7, D) + 2
    sae.save(tmp_path / "sae.safetensors")
    for again in (load(tmp_path / "sae.safetensors"), Normalized.load(tmp_path / "sae.safetensors")):
        assert torch.equal(again(x), sae(x))
    with pytest.raises(ValueError, match=r"holds a Normalized, not a SAE: use Normalized\.load"):
        SAE.load(tmp_path / "sae.safetensors")
    filled(CONFIGS[0]).save(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"not a Normalized: use \w+.load"):
        Normalized.load(tmp_path / "plain.safetensors")


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"W_enc": numbers(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"not a file of type dictionary"):
        load(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load(tmp_path / "text.safetensors")


# ---- SAELens ---------------------------------------------------------------------------------------------------------


def saelens(folder: Path, tensors: dict[str, Tensor], **cfg: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    told = {"d_in": D, "d_sae": WIDTH, "dtype": "float32", "device": "cpu", **cfg}
    (folder / "cfg.json").write_text(json.dumps(told))
    return folder


def weights(*names: str) -> dict[str, Tensor]:
    shapes = {"W_enc": (D, WIDTH), "W_dec": (WIDTH, D), "b_dec": (D,)}
    return {name: numbers(*shapes.get(name, (WIDTH,))) for name in ("W_enc", "W_dec", "b_dec", *names)}


def top(hidden: Tensor, k: int) -> Tensor:
    least = hidden.sort(descending=True).values[:, k - 1, None]
    return hidden.relu() * (hidden >= least)


def test_saelens_standard_of_before_its_version_six(tmp_path: Path) -> None:
    w, x = weights("b_enc"), numbers(5, D)
    folder = saelens(tmp_path, w, hook_point="blocks.3.hook_resid_pre", hook_point_layer=3, activation_fn_str="relu")
    sae = load(folder)
    assert sae.cfg.hook_point == "blocks.3.hook_resid_pre"
    features = ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    assert_close(sae.encode(x), features)
    assert_close(sae(x), features @ w["W_dec"] + w["b_dec"])


def test_saelens_topk(tmp_path: Path) -> None:
    w, x = weights("b_enc"), numbers(5, D)
    named = {"metadata": {"hook_name": "blocks.1.attn.hook_z"}}
    sae = load_saelens(saelens(tmp_path, w, architecture="topk", k=K, apply_b_dec_to_input=False, **named))
    assert (sae.kind, sae.cfg.k, sae.cfg.hook_point) == ("topk", K, "blocks.1.attn.hook_z")
    assert_close(sae.encode(x), top(x @ w["W_enc"] + w["b_enc"], K))
    old = saelens(
        tmp_path / "old", w, activation_fn_str="topk", activation_fn_kwargs={"k": K}, apply_b_dec_to_input=False
    )
    assert_close(load_saelens(old).encode(x), sae.encode(x))
    scaled = saelens(
        tmp_path / "scaled", w, architecture="topk", k=K, apply_b_dec_to_input=False, rescale_acts_by_decoder_norm=True
    )
    norms = w["W_dec"].norm(dim=1)
    features = top((x @ w["W_enc"] + w["b_enc"]) * norms, K)
    assert_close(load_saelens(scaled).encode(x), features)
    assert_close(load_saelens(scaled)(x), features / norms @ w["W_dec"] + w["b_dec"])


def test_saelens_jumprelu_and_batchtopk(tmp_path: Path) -> None:
    w, x = weights("b_enc", "threshold"), numbers(5, D)
    w["threshold"] = w["threshold"].abs()
    sae = load_saelens(saelens(tmp_path / "a", w, architecture="jumprelu", apply_b_dec_to_input=False))
    hidden = x @ w["W_enc"] + w["b_enc"]
    assert_close(sae.encode(x), hidden * (hidden > w["threshold"]))
    del w["threshold"]
    w["topk_threshold"] = torch.tensor(0.7, dtype=torch.float64)
    sae = load_saelens(saelens(tmp_path / "b", w, architecture="batchtopk", k=2.5, apply_b_dec_to_input=False))
    assert_close(sae.encode(x), hidden * (hidden > 0.7))


def test_saelens_gated(tmp_path: Path) -> None:
    w, x = weights("b_gate", "b_mag", "r_mag"), numbers(5, D)
    sae = load_saelens(saelens(tmp_path, w, architecture="gated"))
    read = (x - w["b_dec"]) @ w["W_enc"]
    features = (read + w["b_gate"] > 0) * (x - w["b_dec"]).matmul(w["W_enc"] * w["r_mag"].exp()).add(w["b_mag"]).relu()
    assert_close(sae.encode(x), features)
    assert (features > 0).any()


def test_saelens_transcoder(tmp_path: Path) -> None:
    w, x = {**weights("b_enc"), "W_dec": numbers(WIDTH, 4), "b_dec": numbers(4)}, numbers(5, D)
    sites = {"metadata": {"hook_name": "blocks.0.ln2.hook_normalized"}, "hook_name_out": "blocks.0.hook_mlp_out"}
    sae = load_saelens(saelens(tmp_path, w, architecture="transcoder", d_out=4, **sites))
    assert (sae.cfg.hook_point, sae.cfg.hook_point_out) == ("blocks.0.ln2.hook_normalized", "blocks.0.hook_mlp_out")
    assert_close(sae(x), (x @ w["W_enc"] + w["b_enc"]).relu() @ w["W_dec"] + w["b_dec"])


def test_saelens_normalizations(tmp_path: Path) -> None:
    w, x = weights("b_enc"), 4 * numbers(5, D) + 1

    def core(y: Tensor) -> Tensor:
        return ((y - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()

    def out(features: Tensor) -> Tensor:
        return features @ w["W_dec"] + w["b_dec"]

    sae = load_saelens(saelens(tmp_path / "a", w, normalize_activations="layer_norm"))
    mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True)
    features = core((x - mean) / (deviation + 1e-5))
    assert_close(sae.encode(x), features)
    assert_close(sae(x), out(features) * deviation + mean)
    sae = load_saelens(saelens(tmp_path / "b", w, normalize_activations="constant_norm_rescale"))
    factor = D**0.5 / x.norm(dim=1, keepdim=True)
    assert_close(sae(x), out(core(x * factor)) / factor)
    with pytest.raises(ValueError, match=r"features \[3\] cannot be scaled back"):
        sae.decode(features[:3])
    folder = saelens(tmp_path / "c", w, normalize_activations="expected_average_only_in")
    assert_close(load_saelens(folder, 0.3)(x), out(core(0.3 * x)) / 0.3)
    with pytest.raises(ValueError, match="give scaling_factor="):
        load_saelens(folder)


@pytest.mark.parametrize("cfg", CONFIGS, ids=kind_of)
def test_what_is_written_for_saelens_is_read_again(cfg: SAE.Config, tmp_path: Path) -> None:
    sae, x = filled(cfg), numbers(5, D)
    save_saelens(sae, tmp_path)
    again = load_saelens(tmp_path)
    assert torch.equal(again(x), sae(x))
    assert again.cfg.hook_point == cfg.hook_point
    told = json.loads((tmp_path / "cfg.json").read_text())
    assert told["architecture"] == {"batchtopk": "jumprelu"}.get(sae.kind, sae.kind)
    shapes = {name: tuple(weight.shape) for name, weight in load_file(tmp_path / "sae_weights.safetensors").items()}
    assert (shapes["W_enc"], shapes["W_dec"]) == ((D, WIDTH), (WIDTH, cfg.width_out))


def test_saelens_gets_no_transcoder_of_normalised_inputs(tmp_path: Path) -> None:
    """It has no such thing, and `load_saelens` would refuse the folder."""
    sae = filled(next(cfg for cfg in CONFIGS if kind_of(cfg) == "transcoder"))
    with pytest.raises(ValueError, match=r"SAELens has no transcoder of normalised inputs \(layer_norm\)"):
        save_saelens(Normalized(sae, "layer_norm"), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_saelens_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    w = weights("b_enc")
    with pytest.raises(ValueError, match="architecture 'crosscoder' is not among standard, topk"):
        load_saelens(saelens(tmp_path, w, architecture="crosscoder"))
    with pytest.raises(ValueError, match="'standard' from 6 to 10: b_enc is missing; b_odd is not understood"):
        load_saelens(saelens(tmp_path, {**weights(), "b_odd": w["b_enc"]}))
    with pytest.raises(ValueError, match=r"W_enc is \[6, 10\], expected \[6, 12\]"):
        load_saelens(saelens(tmp_path, w, d_sae=12))
    with pytest.raises(ValueError, match="normalize_activations 'odd' is not understood"):
        load_saelens(saelens(tmp_path, w, normalize_activations="odd"))
    with pytest.raises(ValueError, match=r"activation function 'tanh-relu' .* not understood"):
        load_saelens(saelens(tmp_path, w, activation_fn_str="tanh-relu"))
    with pytest.raises(ValueError, match="a finetuning_scaling_factor is not understood"):
        load_saelens(saelens(tmp_path, {**w, "scaling_factor": numbers(WIDTH)}))
    with pytest.raises(ValueError, match="does not say k"):
        load_saelens(saelens(tmp_path, w, architecture="topk"))
    assert load_saelens(saelens(tmp_path, {**w, "scaling_factor": torch.ones(WIDTH)})).kind == "standard"
    one_head = saelens(tmp_path, w, hook_name="blocks.1.attn.hook_z", hook_head_index=2)
    assert load_saelens(one_head).cfg.hook_point is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no cfg.json"):
        load_saelens(tmp_path / "empty")


# ---- dictionary_learning ---------------------------------------------------------------------------------------------


def learned(folder: Path, tensors: dict[str, Any], dict_class: str | None, **trainer: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "ae.pt")
    if dict_class is not None:
        (folder / "config.json").write_text(
            json.dumps({"trainer": {"dict_class": dict_class, **trainer}, "buffer": {}})
        )
    return folder


def linear() -> dict[str, Tensor]:
    return {"encoder.weight": numbers(WIDTH, D), "encoder.bias": numbers(WIDTH), "decoder.weight": numbers(D, WIDTH)}


def test_dictionary_learning_standard(tmp_path: Path) -> None:
    w, x = {**linear(), "bias": numbers(D)}, numbers(5, D)
    features = ((x - w["bias"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu()
    for sae in (
        load(learned(tmp_path, w, "AutoEncoder")),
        load_dictionary_learning(learned(tmp_path / "b", w, None) / "ae.pt"),
    ):
        assert_close(sae.encode(x), features)
        assert_close(sae(x), features @ w["decoder.weight"].T + w["bias"])
    w = {**linear(), "decoder.bias": numbers(D)}
    features = (x @ w["encoder.weight"].T + w["encoder.bias"]).relu()
    sae = load(learned(tmp_path, w, "AutoEncoderNew"))
    assert_close(sae(x), features @ w["decoder.weight"].T + w["decoder.bias"])


def test_dictionary_learning_topk(tmp_path: Path) -> None:
    w = {**linear(), "b_dec": numbers(D), "k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(0.5)}
    x = numbers(5, D)
    hidden = (x - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"]
    sae = load(learned(tmp_path, w, "AutoEncoderTopK", k=K))
    assert_close(sae.encode(x), top(hidden, K))
    sae = load(learned(tmp_path, w, "BatchTopKSAE", k=K))
    assert_close(sae.encode(x), hidden * (hidden > 0.5))
    assert_close(sae(x), sae.encode(x) @ w["decoder.weight"].T + w["b_dec"])
    with pytest.raises(ValueError, match="AutoEncoderTopK or a BatchTopKSAE, whose tensors are alike"):
        load_dictionary_learning(learned(tmp_path / "b", w, None))
    assert load_dictionary_learning(tmp_path / "b", "BatchTopKSAE").kind == "batchtopk"


def test_dictionary_learning_gated_and_jumprelu(tmp_path: Path) -> None:
    x, names = numbers(5, D), ("r_mag", "gate_bias", "mag_bias")
    w = {**linear(), "decoder_bias": numbers(D), **{name: numbers(WIDTH) for name in names}}
    del w["encoder.bias"]
    norms = w["decoder.weight"].norm(dim=0)
    read = (x - w["decoder_bias"]) @ w["encoder.weight"].T
    features = (read + w["gate_bias"] > 0) * (w["r_mag"].exp() * read + w["mag_bias"]).relu() * norms
    sae = load(learned(tmp_path, w, "GatedAutoEncoder"))
    assert_close(sae.encode(x), features)
    assert_close(sae(x), (features / norms) @ w["decoder.weight"].T + w["decoder_bias"])
    w = {**weights("b_enc"), "threshold": numbers(WIDTH).abs()}
    hidden = x @ w["W_enc"] + w["b_enc"]
    sae = load(learned(tmp_path, w, "JumpReluAutoEncoder"))
    features = hidden * (hidden > w["threshold"]) * w["W_dec"].norm(dim=1)
    assert_close(sae.encode(x), features)


class Runs:
    """Something that a pickle would run."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_pickles_of_more_than_tensors_are_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned(tmp_path, {**linear(), "bias": Runs()}, "AutoEncoder")
    with pytest.raises(ValueError, match="pickle of more than tensors"):
        load(tmp_path)
    (tmp_path / "ae.pt").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="pickle of more than tensors"):
        load(tmp_path)
    assert "run" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="is a CrossCoder; those known are"):
        load(learned(tmp_path, linear(), "CrossCoder"))
    with pytest.raises(ValueError, match=r"'standard' .*: b_dec is missing"):
        load(learned(tmp_path, linear(), "AutoEncoder"))
    with pytest.raises(ValueError, match="which no known dictionary has"):
        load(learned(tmp_path / "b", linear(), None))
