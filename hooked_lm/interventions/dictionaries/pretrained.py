"""`load` and `load_transcoders`: dictionaries of a file, a folder, or a repository on the hub, in any of the known formats."""

from collections.abc import Mapping
from pathlib import Path

from hooked_lm import hub_files
from hooked_lm.interventions.dictionaries.circuit_tracer import load_circuit_tracer
from hooked_lm.interventions.dictionaries.formats import load_dictionary_learning, load_saelens
from hooked_lm.interventions.dictionaries.normalized import Normalized
from hooked_lm.interventions.dictionaries.published import Published, canonical, locate, releases
from hooked_lm.interventions.dictionaries.sae import SAE, frozen, read_dictionary
from hooked_lm.interventions.dictionaries.scopes import load_gemma_scope, load_llama_scope
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders, of_file
from hooked_lm.results import stored

BUNDLED = Path(__file__).parents[2] / "demo" / "dictionary.safetensors"
TRANSCODERS = {  # of the bundled model
    "demo": BUNDLED.with_name("transcoders.safetensors"),
    "demo-cross-layer": BUNDLED.with_name("cross_layer_transcoder.safetensors"),
}
# A file that says the format of a folder -> the files that are read. The first that is there decides.
FILES = {
    "cfg.json": ["cfg.json", "sae_weights.safetensors"],
    "params.npz": ["params.npz"],
    "params.safetensors": ["params.safetensors"],
    "hyperparams.json": ["hyperparams.json", "checkpoints/final.safetensors"],
    "ae.pt": ["ae.pt", "config.json"],
}


def load(
    path: str | Path, sae_id: str | None = None, *, scaling_factor: float | None = None, **download: hub_files.Option
) -> SAE | Normalized:
    """The dictionary of a file or folder that `SAE.save`, `Normalized.save`, SAELens or `dictionary_learning` wrote, or of a
    repository on the hub.

    "demo" is the dictionary of the bundled model, 512 features of the stream after layer 1 (a file of that name is "./demo").
    It is in evaluation mode, and its weights require no gradient.

    Args:
        path: a file or a folder. With `sae_id`: a release by its name in SAELens, such as "gpt2-small-res-jb" or
            "gemma-scope-2b-pt-res-canonical"; a repository on the hub, OWNER/NAME; or a folder that holds the files of one.
        sae_id: the id in the release, such as "blocks.8.hook_resid_pre" or "layer_5/width_16k/canonical"; of a repository or a
            folder the path in it.
        scaling_factor: as for `load_saelens`.
        download: for the hub: `revision`, `cache_dir`, `local_files_only`, `token`, `force_download`. Files in its cache are
            found without a connection.

    Raises ValueError for other files, for an unknown release or id, and if the hub does not give it.

    >>> load("demo")
    TopK(d_in=128, d_sae=512, subtract_b_dec=True, hook_point='blocks.1.hook_resid_post', k=12)
    """
    if sae_id is None:
        if not Path(path).exists() and str(path) in releases():
            raise ValueError(
                f"{str(path)!r} is a release with several dictionaries: give the id of one, load(release, sae_id)"
            )
        return _from_disk(BUNDLED if path == "demo" else Path(path), scaling_factor)
    if Path(path).is_dir():
        inside = (file.relative_to(path).as_posix() for file in Path(path).rglob("*") if file.is_file())
        return _from_disk(Path(path) / canonical(sae_id, inside), scaling_factor)
    found = locate(str(path), sae_id)
    factor = found.scaling_factor if scaling_factor is None else scaling_factor
    return _from_disk(_downloaded(found, download), factor, found.settings)


def load_transcoders(path: str | Path, **download: hub_files.Option) -> LayerTranscoders:
    """The transcoders of several layers of a file that `save` wrote, a folder of circuit-tracer, or a repository on the hub.

    "demo" are those of the MLPs of the bundled model, one for each layer, and "demo-cross-layer" is a cross-layer transcoder of
    them. They are in evaluation mode, and their weights require no gradient.

    Args:
        path: a file or a folder; otherwise a repository on the hub, OWNER/NAME, with the path in it: OWNER/NAME/FOLDER.
        download: for the hub: `revision`, `cache_dir`, `local_files_only`, `token`, `force_download`.

    Raises ValueError for other files, and if the hub does not give it.

    >>> load_transcoders("demo")
    TranscoderSet(4 layers of ... features, batchtopk, k=...; blocks.*.mlp.hook_in to blocks.*.hook_mlp_out)
    """
    if str(path) in TRANSCODERS:
        return of_file(TRANSCODERS[str(path)]).float()
    if Path(path).is_dir():
        return load_circuit_tracer(path, None, None, **download)
    parts = str(path).split("/")
    if Path(path).exists() or len(parts) < 2 or Path(path).suffix == ".safetensors":
        return of_file(path)
    inside = "/".join(parts[2:])
    wanted = [f"{inside}/{name}".lstrip("/") for name in ("config.yaml", "layer_*.safetensors", "W_*.safetensors")]
    return load_circuit_tracer(
        hub_files.snapshot("/".join(parts[:2]), wanted, **download) / inside, None, None, **download
    )


def _downloaded(found: Published, download: Mapping[str, hub_files.Option]) -> Path:
    """The folder of a published dictionary, in the cache of the hub."""
    folder = found.folder.strip("/")
    if folder.endswith("/canonical"):
        folder = canonical(folder, hub_files.files(found.repository, **download))
    wanted = [f"{folder}/{name}" for names in FILES.values() for name in names]
    where = hub_files.snapshot(found.repository, wanted, **download) / folder
    if not any((where / name).exists() for name in FILES):
        raise ValueError(
            f"the folder {folder!r} of {found.repository!r} has none of {', '.join(FILES)}, which identify the known formats; "
            "without a connection to the hub, only what is in its cache is found"
        )
    return where


@stored.names_the_file
def _from_disk(
    path: Path, scaling_factor: float | None, settings: Mapping[str, object] | None = None
) -> SAE | Normalized:
    """The dictionary of a file or folder."""
    kind = next((name for name in FILES if (path / name).exists()), None)
    if kind == "cfg.json":
        return load_saelens(path, scaling_factor, settings)
    if kind in ("params.npz", "params.safetensors"):
        return load_gemma_scope(path)
    if kind == "hyperparams.json":
        return load_llama_scope(path)
    if path.is_dir() or path.suffix in (".pt", ".pth"):
        return load_dictionary_learning(path)
    sae, normalization = read_dictionary(path)
    return sae if normalization is None else frozen(Normalized(sae, normalization))
