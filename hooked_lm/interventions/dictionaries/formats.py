"""File formats of dictionaries: folders of SAELens and `dictionary_learning`. No pickled code.

Results equal those of the other libraries: factors that they apply in each forward pass are folded into the weights.
"""

import json
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hooked_lm.files import made_folder, replacing
from hooked_lm.interventions.dictionaries.normalized import NORMS, Normalized
from hooked_lm.interventions.dictionaries.sae import KINDS, SAE, filled, frozen
from hooked_lm.results import stored

Tensors = dict[str, Tensor]
# The transcoders of SAELens, and the kinds that they are here; those with a skip connection have W_skip as [d_out, d_in].
TRANSCODERS = {
    "skip_transcoder": "transcoder",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
}


@stored.names_the_file
def load_saelens(
    path: str | Path, scaling_factor: float | None = None, settings: Mapping[str, object] | None = None
) -> SAE | Normalized:
    """A dictionary in SAELens's format: a folder with `cfg.json` and `sae_weights.safetensors`.

    Architectures "standard", "topk", "batchtopk", "jumprelu", "gated", and the transcoders "transcoder", "skip_transcoder",
    "jumprelu_transcoder" and "jumprelu_skip_transcoder". The site in the config becomes the dictionary's `cfg.hook_point`,
    unless it is that of a single head.

    Args:
        scaling_factor: for `normalize_activations` "expected_average_only_in": the factor of the vectors in training, sqrt(d_in)
            over their mean norm, which SAELens does not store. It is folded into the weights.
        settings: what takes the place of settings in `cfg.json`.

    Raises ValueError for unsupported architectures, settings and tensors, with their names.
    """
    path = Path(path)
    cfg, tensors = read_json(path / "cfg.json"), read_tensors(path / "sae_weights.safetensors")
    about = dict(cfg)
    for more in ("meta", "metadata"):
        if not isinstance(cfg.get(more, {}), dict):
            raise ValueError(f"{path}: {more} in cfg.json is a {type(cfg[more]).__name__}, not settings by name")
        about |= cfg.get(more, {})
    about |= settings or {}
    kind = about.get("architecture", "standard")
    known = {name: name for name in KINDS} | TRANSCODERS
    if kind not in known:
        raise ValueError(f"{path}: the architecture {kind!r} is not among {', '.join(known)}")
    if missing := [name for name in ("d_in", "d_sae") if name not in about]:
        raise ValueError(f"{path}: cfg.json does not say {' and '.join(missing)}")
    factor = tensors.pop("scaling_factor", torch.ones(1))  # some versions stored ones
    if about.get("finetuning_scaling_factor") or not bool((factor == 1).all()):
        raise ValueError(f"{path}: a finetuning_scaling_factor is not understood")
    activation = about.get("activation_fn", about.get("activation_fn_str", "relu"))
    k = about.get("k", (about.get("activation_fn_kwargs") or {}).get("k"))
    if kind == "standard" and activation != "relu":
        if activation != "topk":
            raise ValueError(
                f"{path}: the activation function {activation!r} of a standard architecture is not understood"
            )
        kind = "topk"
    is_transcoder = kind.endswith("transcoder")
    described: dict[str, Any] = {
        "kind": known[kind],
        "d_in": about["d_in"],
        "d_sae": about["d_sae"],
        "d_out": about.get("d_out"),
        "subtract_b_dec": not is_transcoder and bool(about.get("apply_b_dec_to_input", True)),
        "hook_point": about.get("hook_name", about.get("hook_point")) if about.get("hook_head_index") is None else None,
        "hook_point_out": about.get("hook_name_out") or None,
        "skip_connection": "skip" in kind,
    }
    tensors = {name: weight.T if name == "W_skip" else weight for name, weight in tensors.items()}
    if "topk" in kind:
        if k is None:
            raise ValueError(f"{path}: cfg.json does not say k, how many features are active")
        described["k"] = round(k) if isinstance(k, float) and math.isfinite(k) else k
    if kind == "batchtopk" and "topk_threshold" in tensors:
        tensors["threshold"] = tensors.pop("topk_threshold").to(tensors["b_enc"].dtype).expand(about["d_sae"]).clone()
    sae = with_weights(described, tensors, path)
    if about.get("rescale_acts_by_decoder_norm"):
        sae.scale_features_(sae.W_dec.detach().norm(dim=1))
    return frozen(_with_normalization(sae, about.get("normalize_activations"), scaling_factor, path))


def save_saelens(sae: SAE | Normalized, path: str | Path) -> None:
    """Writes a dictionary as a folder that SAELens reads; BatchTopK is saved as "jumprelu", as it is outside training.

    Raises ValueError for transcoders whose activation SAELens does not support, and for those of normalised inputs.
    """
    inner, how = (sae.sae, sae.how) if isinstance(sae, Normalized) else (sae, "none")
    cfg, tensors = inner.cfg, {name: weight.detach().cpu() for name, weight in inner.state_dict().items()}
    kind = "jumprelu" if inner.kind == "batchtopk" else inner.kind
    if inner.kind == "batchtopk":
        tensors["threshold"] = tensors["threshold"].clamp_min(0)
    is_transcoder = cfg.hook_point_out is not None or cfg.width_out != cfg.d_in
    if is_transcoder and how != "none":
        raise ValueError(f"SAELens has no transcoder of normalised inputs ({how}): use its method save")
    if is_transcoder and kind != "transcoder":
        if kind != "jumprelu":
            raise ValueError(f"SAELens has no transcoder of kind {kind!r}: use its method save")
        kind = "jumprelu_transcoder"
    if inner.W_skip is not None:
        kind = kind.replace("transcoder", "skip_transcoder")
        tensors["W_skip"] = tensors["W_skip"].T
    settings: dict[str, Any] = {
        "architecture": kind, "d_in": cfg.d_in, "d_sae": cfg.d_sae, "dtype": str(inner.W_enc.dtype).removeprefix("torch."),
        "device": "cpu", "apply_b_dec_to_input": cfg.subtract_b_dec, "normalize_activations": how,
        "reshape_activations": "hook_z" if (cfg.hook_point or "").endswith("hook_z") else "none",
        "metadata": {"hook_name": cfg.hook_point, "sae_lens_version": "6.0.0"},
    }  # fmt: skip
    if kind == "topk":
        settings["k"] = inner.to_dict()["k"]
    if "transcoder" in kind:
        settings |= {"d_out": cfg.width_out, "hook_name_out": cfg.hook_point_out or ""}
    folder = made_folder(path)
    stored.write(folder / "sae_weights.safetensors", "pt", tensors, {})
    with replacing(folder / "cfg.json") as unfinished:
        unfinished.write_text(json.dumps(settings, indent=1), encoding="utf-8")


@stored.names_the_file
def load_dictionary_learning(path: str | Path, dict_class: str | None = None) -> SAE:
    """A dictionary in the format of `dictionary_learning`: `ae.pt`, or the folder with it and `config.json`.

    `ae.pt` may contain tensors only; other pickles are refused. Supported classes are AutoEncoder, AutoEncoderNew,
    GatedAutoEncoder, JumpReluAutoEncoder, AutoEncoderTopK and BatchTopKSAE. Features have the same scale as in that library:
    gated and JumpReLU features are multiplied by the norm of their decoder direction.

    Args:
        dict_class: the class, needed if there is no config and the names of the tensors are ambiguous.

    Raises ValueError for other classes, for unknown tensors, and if the class is ambiguous.
    """
    path = Path(path)
    file, config = (path / "ae.pt", path / "config.json") if path.is_dir() else (path, path.with_name("config.json"))
    trainer = read_json(config).get("trainer", {}) if config.exists() else {}
    tensors = _unpickled(file)
    named, kind = _class_of(tensors, dict_class or trainer.get("dict_class"), file)
    k = tensors.pop("k", None) if "topk" in kind else None
    weights = {named.get(name, name): weight for name, weight in tensors.items()}
    for name in ("W_enc", "W_dec"):
        if name not in weights:
            raise ValueError(f"{file} has tensors {sorted(tensors)}, and {name} is not among them")
        weights[name] = weights[name] if named is JUMP else weights[name].T.contiguous()
    d_in, d_sae = weights["W_enc"].shape
    if kind == "topk":
        weights.pop("threshold", None)  # an alternative to k at inference, not used here
    elif kind == "batchtopk" and "threshold" in weights:
        weights["threshold"] = weights["threshold"].to(weights["W_enc"].dtype).expand(d_sae).clone()
    described = {"kind": kind, "d_in": d_in, "d_sae": d_sae, "subtract_b_dec": named not in (NEW, JUMP)}
    if "topk" in kind:
        described["k"] = int(trainer["k"] if k is None else k)
    sae = with_weights(described, weights, file)
    if kind in ("gated", "jumprelu"):
        sae.scale_features_(sae.W_dec.detach().norm(dim=1))
    return frozen(sae)


# ---- dictionary_learning: names -------------------------------------------------------------------------------------

LINEAR = {"encoder.weight": "W_enc", "decoder.weight": "W_dec"}
PLAIN = {**LINEAR, "encoder.bias": "b_enc", "bias": "b_dec"}
NEW = {**LINEAR, "encoder.bias": "b_enc", "decoder.bias": "b_dec"}
TOPK = {**LINEAR, "encoder.bias": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
GATED = {**LINEAR, "decoder_bias": "b_dec", "r_mag": "r_mag", "gate_bias": "b_gate", "mag_bias": "b_mag"}
JUMP = {name: name for name in ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")}
CLASSES = {
    "AutoEncoder": (PLAIN, "standard"),
    "AutoEncoderNew": (NEW, "standard"),
    "GatedAutoEncoder": (GATED, "gated"),
    "JumpReluAutoEncoder": (JUMP, "jumprelu"),
    "AutoEncoderTopK": (TOPK, "topk"),
    "BatchTopKSAE": (TOPK, "batchtopk"),
}


def _class_of(tensors: Tensors, dict_class: str | None, file: Path) -> tuple[dict[str, str], str]:
    """The mapping of tensor names to weights, and the kind of the dictionary."""
    if dict_class is not None and dict_class not in CLASSES:
        raise ValueError(f"{file} is a {dict_class}; those known are {', '.join(CLASSES)}")
    if dict_class is not None:
        return CLASSES[dict_class]
    class_with = {"gate_bias": "GatedAutoEncoder", "W_enc": "JumpReluAutoEncoder", "b_dec": "AutoEncoderTopK"}
    class_with |= {"bias": "AutoEncoder", "decoder.bias": "AutoEncoderNew"}
    found = next((of for name, of in class_with.items() if name in tensors), None)
    if found is None:
        raise ValueError(f"{file} has tensors {sorted(tensors)}, which no known dictionary has")
    if found == "AutoEncoderTopK" and "threshold" in tensors:
        raise ValueError(
            f"{file} is an AutoEncoderTopK or a BatchTopKSAE, whose tensors are alike, and there is no config.json that says "
            "which: give dict_class="
        )
    return CLASSES[found]


# ---- files ----------------------------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"there is no {file.name} in {file.parent}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not settings by name")
    return found


def read_tensors(file: Path) -> Tensors:
    if not file.exists():
        raise ValueError(f"there is no {file.name} in {file.parent}")
    try:
        with safe_open(str(file), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from None


def _unpickled(file: Path) -> Tensors:
    """The tensors in a file of `torch.save`, loaded with `weights_only`."""
    if not file.exists():
        raise ValueError(f"there is no {file.name} in {file.parent}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of pickles, all of which are refused or harmless
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file} is a pickle of more than tensors, which could run anything when it is opened, so it is not: {reason} "
            "Save the state dict as safetensors, or as tensors alone."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file} holds no state dict: names and their tensors")
    return dict(found)


def with_weights(described: object, tensors: Tensors, path: Path) -> SAE:
    """A dictionary with these weights, all converted to the dtype of `W_enc`."""
    same = {
        name: weight.to(tensors["W_enc"].dtype) if "W_enc" in tensors else weight for name, weight in tensors.items()
    }
    return filled(described, {name: weight.clone() for name, weight in same.items()}, str(path))


def _with_normalization(sae: SAE, how: str | bool | None, scaling_factor: float | None, path: Path) -> SAE | Normalized:
    if how is True or how == "expected_average_only_in":
        if scaling_factor is None:
            raise ValueError(
                f"{path} wants vectors multiplied by a number that SAELens does not store (normalize_activations is {how!r}): "
                "give scaling_factor=, sqrt(d_in) over the mean length of the site's vectors, or 1 if it is folded in"
            )
        return sae.scale_inputs_(scaling_factor, scaling_factor)
    if how in NORMS:
        if not sae.cfg.subtract_b_dec and (sae.kind == "transcoder" or sae.cfg.hook_point_out):
            raise ValueError(f"{path}: normalize_activations {how!r} of a transcoder is not understood")
        return Normalized(sae, str(how))
    if how not in (None, False, "none"):
        raise ValueError(f"{path}: normalize_activations {how!r} is not understood")
    return sae
