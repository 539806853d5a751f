"""The files of Gemma Scope (`params.npz`, `params.safetensors`) and of Llama Scope: JumpReLU dictionaries and transcoders."""

import re
from pathlib import Path
from typing import Any

import torch

from hooked_lm.interventions.dictionaries.formats import Tensors, read_json, read_tensors, with_weights
from hooked_lm.interventions.dictionaries.sae import SAE, frozen
from hooked_lm.results import stored

__all__ = ["load_gemma_scope", "load_llama_scope", "read_npz"]

NAMES = {"w_enc": "W_enc", "w_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
SKIP = "affine_skip_connection"  # of transcoders of Gemma Scope 2, [d_in, d_out]
# What a path says of the sites of input and output: the name of a repository of Gemma Scope, or a folder of Gemma Scope 2.
# Transcoders of the former read the norm before its weight, those of the latter the input of the MLP.
SITES = {
    r"gemma-scope-\w+-\w+-res\b|resid_post": ("hook_resid_post", None),
    r"gemma-scope-\w+-\w+-mlp\b|mlp_out": ("hook_mlp_out", None),
    r"gemma-scope-\w+-\w+-att\b|attn_out": ("attn.hook_z", None),
    r"gemma-scope-\w+-\w+-transcoders\b": ("ln2.hook_normalized", "hook_mlp_out"),
    r"transcoder": ("mlp.hook_in", "hook_mlp_out"),
}


@stored.names_the_file
def load_gemma_scope(path: str | Path) -> SAE:
    """A dictionary or transcoder of Gemma Scope (a folder with `params.npz`) or Gemma Scope 2 (with `params.safetensors`).

    The site is in the path: the layer in the name of a folder, its kind in that of the repository or of a folder; without these
    the dictionary knows none. Dictionaries of `hook_z` read all heads, flattened. Cross-layer transcoders, which have a file for
    each layer, load with `load_circuit_tracer`.

    Raises ValueError for crosscoders and for dictionaries of the embedding, whose inputs have other scales than the model's, and
    for unknown tensors.
    """
    path = Path(path)
    where = path.absolute().as_posix()
    if strange := re.search(r"crosscoder|\bclt|embedding", where):
        raise ValueError(
            f"{path}: {strange[0]} of Gemma Scope is not understood, only autoencoders and transcoders of layers"
        )
    given = (
        read_tensors(path / "params.safetensors")
        if (path / "params.safetensors").exists()
        else read_npz(path / "params.npz")
    )
    tensors = {NAMES.get(name.lower(), name): weight for name, weight in given.items()}
    if "W_enc" not in tensors or tensors["W_enc"].ndim != 2:
        raise ValueError(f"{path} has the tensors {', '.join(given)}, and no matrix W_enc among them")
    d_in, d_sae = tensors["W_enc"].shape
    layer = re.findall(r"layer_(\d+)", where)
    kinds = next((sites for pattern, sites in SITES.items() if re.search(pattern, where)), (None, None))
    site, site_out = (f"blocks.{layer[-1]}.{kind}" if layer and kind else None for kind in kinds)
    described = {"kind": "jumprelu", "d_in": d_in, "d_sae": d_sae, "subtract_b_dec": False, "hook_point": site}
    if site_out is not None:
        described |= {"hook_point_out": site_out, "skip_connection": SKIP in tensors}
        tensors = {"W_skip" if name == SKIP else name: weight for name, weight in tensors.items()}
    return frozen(with_weights(described, tensors, path))


@stored.names_the_file
def load_llama_scope(path: str | Path) -> SAE:
    """A dictionary of Llama Scope: a folder with `hyperparams.json` and `checkpoints/final.safetensors`.

    It was trained on vectors that were scaled by a number in the file, which is folded into the weights; features and thresholds
    have the scale of SAELens. Raises ValueError for other activation functions and settings.
    """
    path = Path(path)
    cfg, tensors = read_json(path / "hyperparams.json"), read_tensors(path / "checkpoints" / "final.safetensors")
    expected: dict[str, Any] = {
        "act_fn": "jumprelu",
        "apply_decoder_bias_to_pre_encoder": False,
        "use_glu_encoder": False,
    }
    for name, value in expected.items():
        if cfg.get(name, value) != value:
            raise ValueError(f"{path}: {name} {cfg[name]!r} is not understood, only {value!r}")
    if (written := cfg.get("hook_point_out", cfg["hook_point_in"])) != cfg["hook_point_in"]:
        raise ValueError(f"{path}: transcoders, which write {written!r}, are not understood")
    norm = cfg["d_model"] ** 0.5 / cfg["dataset_average_activation_norm"]["in"]
    pairs = {"encoder.weight": "W_enc", "decoder.weight": "W_dec", "encoder.bias": "b_enc", "decoder.bias": "b_dec"}
    weights = {pairs.get(name, name): weight.t().contiguous() for name, weight in tensors.items()}
    weights["threshold"] = torch.full((cfg["d_sae"],), cfg["jump_relu_threshold"] * norm)
    described = {"kind": "jumprelu", "d_in": cfg["d_model"], "d_sae": cfg["d_sae"], "subtract_b_dec": False}
    sae = with_weights(described | {"hook_point": cfg["hook_point_in"]}, weights, path)
    return frozen(sae.scale_inputs_(norm, norm))


def read_npz(file: Path) -> Tensors:
    """The arrays of a file of numpy; no pickles."""
    import numpy as np

    if not file.exists():
        raise ValueError(f"there is no {file.name} in {file.parent}")
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
