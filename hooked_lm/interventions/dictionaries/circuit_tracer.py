"""Transcoders of several layers in the layouts of circuit-tracer: folders with a file for each layer, and `config.yaml`.

A set has `layer_0.safetensors`, ..., with `W_enc` [d_sae, d_in], `W_dec` [d_sae, d_out], `b_enc`, `b_dec`, and, if it has them,
`W_skip` [d_out, d_in] and `activation_function.threshold`. A cross-layer transcoder of n layers has, for layer i,
`W_enc_i.safetensors` with `W_enc_i` [d_sae, d_in], `b_enc_i`, `b_dec_i` and perhaps `threshold_i`, and `W_dec_i.safetensors` with
`W_dec_i` [d_sae, n - i, d_out]. No pickles.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from torch import Tensor

from hooked_lm import hub_files
from hooked_lm.files import made_folder, replacing
from hooked_lm.interventions.dictionaries.formats import Tensors, read_tensors, with_weights
from hooked_lm.interventions.dictionaries.sae import SAE, frozen
from hooked_lm.interventions.dictionaries.scopes import read_npz
from hooked_lm.interventions.dictionaries.transcoder_set import CrossLayerTranscoder, LayerTranscoders, TranscoderSet
from hooked_lm.results import stored

CONFIG = "config.yaml"
SET, ACROSS = "transcoder_set", "cross_layer_transcoder"  # the values of `model_kind`
READ, WRITTEN = "feature_input_hook", "feature_output_hook"
THRESHOLD = "activation_function.threshold"
HUB = "hf://"


def load_circuit_tracer(
    path: str | Path, site: str | None = None, site_out: str | None = None, **download: hub_files.Option
) -> LayerTranscoders:
    """The transcoders of a folder in the layout of circuit-tracer: a `TranscoderSet` or a `CrossLayerTranscoder`.

    With thresholds they are JumpReLU, else ReLU. `config.yaml` names the sites; it may also list the files, in the folder or on
    the hub, which then may be those of Gemma Scope (`params.npz`, with `W_enc` as [d_in, d_sae]) and of Gemma Scope 2.

    Args:
        site, site_out: the sites that are read and written, without the layer, if there is no config: "mlp.hook_in",
            "hook_mlp_out".
        download: for files on the hub: `revision`, `cache_dir`, `local_files_only`, `token`, `force_download`.

    Raises ValueError for a folder without such files, for unknown tensors, if the sites are not known, and if the hub does not
    give a file.
    """
    path = Path(path)
    listed = _listed(path)
    files = None if listed is None else [_on_disk(file, path, download) for file in listed]
    return _from_disk(path, site, site_out, files)


@stored.names_the_file
def _listed(path: Path) -> list[str] | None:
    """The files that a config lists, if it does."""
    listed = _read_config(path / CONFIG).get("transcoders")
    if listed is not None and not (isinstance(listed, list) and listed):
        raise ValueError(f"{path / CONFIG}: transcoders must be a list of files, got {listed!r}")
    return None if listed is None else [str(file) for file in listed]


@stored.names_the_file
def _from_disk(path: Path, site: str | None, site_out: str | None, files: list[Path] | None) -> LayerTranscoders:
    """The transcoders of a folder, of these files or of those that are numbered."""
    cfg = _read_config(path / CONFIG)
    sites = site or cfg.get(READ), site_out or cfg.get(WRITTEN)
    if not all(isinstance(name, str) for name in sites):
        raise ValueError(
            f"{path} does not say which sites are read and written: give site='mlp.hook_in', site_out='hook_mlp_out'"
        )
    if files is None:
        files = _numbered(path, r"layer_(\d+)\.safetensors") or _numbered(path, r"W_enc_(\d+)\.safetensors")
    if not files:
        raise ValueError(f"{path} has no layer_0.safetensors and no W_enc_0.safetensors")
    parts = [_tensors(file, layer) for layer, file in enumerate(files)]
    is_across = any(tensors["W_dec"].ndim == 3 for tensors in parts)
    wanted = cfg.get("model_kind", ACROSS if is_across else SET)
    if wanted != (ACROSS if is_across else SET):
        raise ValueError(f"{path / CONFIG} says model_kind {wanted!r}, and W_dec has {parts[0]['W_dec'].ndim} axes")
    saes = [_sae(tensors, layer, len(parts), sites, path) for layer, tensors in enumerate(parts)]  # type: ignore[arg-type]
    return frozen((CrossLayerTranscoder if is_across else TranscoderSet)(saes))


def save_circuit_tracer(
    transcoders: LayerTranscoders, path: str | Path, model_name: str | None = None, scan: str | None = None
) -> None:
    """Writes transcoders of several layers as a folder that circuit-tracer reads; BatchTopK is saved as JumpReLU.

    Args:
        model_name, scan: of the config: the model, by its name on the hub, and the identifier of feature pages.

    Raises ValueError for TopK, which circuit-tracer lacks, for layers that do not begin with 0 or have gaps, for sites that are
    not those of the same part of each layer, and for a cross-layer transcoder with skip connections, whose files have none.
    """
    of_layers = list(transcoders.layers)
    if of_layers != list(range(len(of_layers))):
        raise ValueError(f"circuit-tracer has transcoders of all layers from 0 on, and these are of layers {of_layers}")
    sites = [_without_layer(names) for names in (transcoders.sites, transcoders.sites_out)]
    if wrong := [sae.kind for sae in transcoders.parts if sae.kind == "topk"]:
        raise ValueError(
            f"circuit-tracer has no transcoder of kind {wrong[0]!r}: train one of kind 'batchtopk', which has thresholds after "
            "training, or use the method save"
        )
    if transcoders.across and transcoders.skip(0) is not None:
        raise ValueError(
            "circuit-tracer has no files for a cross-layer transcoder with skip connections: use the method save"
        )
    folder = made_folder(path)
    for layer, sae in enumerate(transcoders.parts):
        for name, tensors in _files_of(sae, layer, transcoders.across).items():
            stored.write(folder / name, "pt", tensors, {})
    settings = {
        "model_name": model_name,
        "model_kind": ACROSS if transcoders.across else SET,
        READ: sites[0],
        WRITTEN: sites[1],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in {**settings, "scan": scan}.items() if value is not None]
    with replacing(folder / CONFIG) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read_config(file: Path) -> dict[str, Any]:
    """The settings of a config; none if there is no file."""
    if not file.exists():
        return {}
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML that can be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not settings by name")
    return found


def _on_disk(file: str, folder: Path, download: Mapping[str, hub_files.Option]) -> Path:
    """A file of the list in a config: relative to the folder, or hf://OWNER/NAME/PATH, downloaded.

    With its revision, as hf://OWNER/NAME@REVISION/PATH or hf://OWNER/NAME/PATH?revision=REVISION.
    """
    if not file.startswith(HUB):
        return folder / file
    where, _, query = file.removeprefix(HUB).partition("?")
    if where.count("/") < 2:
        raise ValueError(f"{folder / CONFIG} lists {file!r}, expected hf://OWNER/NAME/PATH")
    owner, name, inside = where.split("/", 2)
    name, _, revision = name.partition("@")
    revision = parse_qs(query).get("revision", [revision])[0]
    options = {**download, **({"revision": revision} if revision else {})}
    return hub_files.snapshot(f"{owner}/{name}", [inside], **options) / inside


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """The files that match, in the order of their numbers; ValueError for a number that is missing."""
    found = {int(match[1]): file for file in folder.glob("*") if (match := re.fullmatch(pattern, file.name))}
    if missing := [number for number in range(len(found)) if number not in found]:
        raise ValueError(f"{folder} has files of {len(found)} layers, and none of layer {missing[0]}")
    return [found[number] for number in sorted(found)]


def _tensors(file: Path, layer: int) -> Tensors:
    """The tensors of a layer by our names, with the axes that circuit-tracer gives them."""
    if file.suffix == ".npz" or _is_scope(given := read_tensors(file)):
        scope = read_npz(file) if file.suffix == ".npz" else given
        found = {name.lower(): weight for name, weight in scope.items()}
        skip = {} if (of := found.get("affine_skip_connection")) is None else {"W_skip": of.T}
        decoder = found["w_dec"]
        names = {"W_enc": found["w_enc"].T, "W_dec": decoder if decoder.ndim == 2 else decoder[:, layer:]}
        return {**names, **skip, **{name: found[name] for name in ("b_enc", "b_dec", "threshold") if name in found}}
    if f"W_enc_{layer}" in given:
        given |= read_tensors(file.with_name(f"W_dec_{layer}.safetensors"))
        return {name.removesuffix(f"_{layer}"): weight for name, weight in given.items()}
    return {"threshold" if name == THRESHOLD else name: weight for name, weight in given.items()}


def _is_scope(tensors: Tensors) -> bool:
    """Whether the tensors are named as in Gemma Scope 2."""
    return "w_enc" in tensors


def _sae(tensors: Tensors, layer: int, n_layers: int, sites: tuple[str, str], path: Path) -> SAE:
    """The dictionary of a layer."""
    for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
        if name not in tensors:
            raise ValueError(
                f"{path}, layer {layer}, has the tensors {', '.join(sorted(tensors))}, and {name} is not among them"
            )
    if "threshold" in tensors and (n_wrong := int((tensors["threshold"] < 0).sum())):
        raise ValueError(
            f"{path}, layer {layer}, has {n_wrong} thresholds below 0, above which circuit-tracer has features below 0, and none "
            "are here"
        )
    d_sae, d_in = tensors["W_enc"].shape
    decoder = tensors["W_dec"]
    n_outputs = decoder.shape[1] if decoder.ndim == 3 else 1
    if decoder.ndim == 3 and n_outputs != n_layers - layer:
        raise ValueError(
            f"{path}, layer {layer}: W_dec writes to {n_outputs} layers, expected {n_layers - layer} of {n_layers}"
        )
    described = {
        "kind": "jumprelu" if "threshold" in tensors else "transcoder",
        "d_in": d_in,
        "d_sae": d_sae,
        "d_out": decoder.shape[-1],
        "subtract_b_dec": False,
        "hook_point": f"blocks.{layer}.{sites[0]}",
        "hook_point_out": f"blocks.{layer}.{sites[1]}",
        "skip_connection": "W_skip" in tensors,
        "n_outputs": n_outputs,
    }
    ours = {**tensors, "W_enc": tensors["W_enc"].T.contiguous(), "W_dec": decoder.flatten(1)}
    if "W_skip" in ours:
        ours["W_skip"] = ours["W_skip"].T.contiguous()
    return with_weights(described, ours, path)


# ---- writing ---------------------------------------------------------------------------------------------------------


def _files_of(sae: SAE, layer: int, is_across: bool) -> dict[str, Tensors]:
    """The tensors of a layer, by the file that they are in."""
    weights: dict[str, Tensor] = {name: weight.detach().cpu() for name, weight in sae.state_dict().items()}
    weights["W_enc"] = weights["W_enc"].T
    if "threshold" in weights:
        weights["threshold"] = weights["threshold"].clamp_min(0)  # below 0 all positive features are active
    if "W_skip" in weights:
        weights["W_skip"] = weights["W_skip"].T
    if is_across:
        decoder = weights.pop("W_dec").unflatten(1, (sae.cfg.n_outputs, sae.cfg.width_out))
        first = {f"{name}_{layer}": weight for name, weight in weights.items()}
        return {f"W_enc_{layer}.safetensors": first, f"W_dec_{layer}.safetensors": {f"W_dec_{layer}": decoder}}
    named = {THRESHOLD if name == "threshold" else name: weight for name, weight in weights.items()}
    return {f"layer_{layer}.safetensors": named}


def _without_layer(sites: Sequence[str]) -> str:
    """The name that the sites share after the number of the layer. Raises ValueError if they differ."""
    names = {re.sub(r"^blocks\.\d+\.", "", site) for site in sites}
    if len(names) != 1 or not all(site.startswith("blocks.") for site in sites):
        raise ValueError(
            f"circuit-tracer has the same site in each layer, blocks.LAYER.SITE; these are {', '.join(sites)}"
        )
    return names.pop()


__all__ = ["load_circuit_tracer", "save_circuit_tracer"]
