"""Published dictionaries by the names that SAELens gives them: a release and an id mean a folder of a repository on the hub."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

__all__ = ["Published", "locate", "releases"]

TABLE = "pretrained_saes.yaml"  # of the package sae_lens
SITES = {"res": "resid_post", "mlp": "mlp_out", "att": "attn_out"}
SIZES = "270m-pt,270m-it,1b-pt,1b-it,4b-pt,4b-it,12b-pt,12b-it,27b-pt,27b-it"
AJT = "gpt2-small-{res_sce,res_scefr,res_scl,res_sle,res_slefr,res_sll}-ajt"
CHANIN = "chanind/gemma-2-2b-batch-topk-matryoshka-saes-w-32k-l0-40"
# The release with {alternatives}, its ids as a pattern, the repository and the folder; {0}, {1}, ... are the alternatives and
# then the groups of the pattern.
RULES = [
    ("gpt2-small-res-jb", r"(blocks\.\d+\.hook_resid_p\w+)", "jbloom/GPT2-Small-SAEs-Reformatted", "{0}"),
    ("gpt2-small-res-jb-feature-splitting", r"(blocks\.8\.hook_resid_pre_\d+)",
     "jbloom/GPT2-Small-Feature-Splitting-Experiment-Layer-8", "{0}"),
    ("gpt2-small-{attn-out,mlp-out,resid-mid}-v5-{32k,128k}", r"blocks\.(\d+)\.hook_\w+",
     "jbloom/GPT2-Small-OAI-v5-{1}-{0}-SAEs", "v5_{1}_layer_{2}"),
    ("gpt2-small-resid-post-v5-{128k}", r"blocks\.(\d+)\.hook_\w+",
     "jbloom/GPT2-Small-OAI-v5-{0}-resid-post-SAEs", "v5_{0}_layer_{1}"),
    ("gpt2-small-resid-post-v5-{32k}", r"blocks\.(\d+)\.hook_\w+",
     "jbloom/GPT2-Small-OAI-v5-{0}-resid-post-SAEs", "v5_{0}_layer_{1}.pt"),
    (AJT, r"blocks\.(\d+)\.hook_resid_pre", "neuronpedia/gpt2-small__{0}-ajt", "{1}-{0}-ajt"),
    ("pythia-70m-deduped-{res,mlp,att}-sm", r"blocks\.(\d+)\.hook_\w+_(?:post|out)",
     "ctigges/pythia-70m-deduped__{0}-sm_processed", "{1}-{0}-sm"),
    ("pythia-70m-deduped-{res}-sm", r"blocks\.0\.hook_resid_pre", "ctigges/pythia-70m-deduped__{0}-sm_processed", "e-{0}-sm"),
    ("gemma-scope-{2b-pt,9b-pt}-{res,mlp,att}", r"(.+/width_\w+/average_l0_\d+)", "google/gemma-scope-{0}-{1}", "{2}"),
    ("gemma-scope-{9b-it,27b-pt}-res", r"(.+/width_\w+/average_l0_\d+)", "google/gemma-scope-{0}-res", "{1}"),
    ("gemma-scope-{2b-pt,9b-pt}-{res,mlp,att}-canonical", r"(layer_\d+/width_\w+/canonical)",
     "google/gemma-scope-{0}-{1}", "{2}"),
    ("gemma-scope-{9b-it,27b-pt}-res-canonical", r"(layer_\d+/width_\w+/canonical)", "google/gemma-scope-{0}-res", "{1}"),
    *((f"gemma-scope-2-{{{SIZES if site == 'res' else SIZES.replace('27b-pt,', '')}}}-{site}{of}", r"(layer_\d+_width_\w+)",
       "google/gemma-scope-2-{0}", f"{folder}{of.replace('-', '_')}/{{1}}")
      for site, folder in SITES.items() for of in ("", "-all")),
    *((f"llama_scope_lx{site}_{{8,32}}x", rf"l(\d+){site}_\d+x", f"fnlp/Llama3_1-8B-Base-LX{site.upper()}-{{0}}x",
       f"Llama3_1-8B-Base-L{{1}}{site.upper()}-{{0}}x") for site in "rma"),
    ("gemma-2-2b-res-matryoshka-dc", r"(blocks\.\d+\.hook_resid_post)", CHANIN, "standard/{0}"),
    ("gemma-2-2b-res-snap-matryoshka-dc", r"(blocks\.\d+\.hook_resid_post)", CHANIN, "snap/{0}"),
]  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Where a published dictionary is, and what its files do not say.

    Args:
        repository, folder: on the hub. A folder that ends in "canonical" is that whose `average_l0` is closest to 100.
        scaling_factor: as for `load_saelens`, if it is known.
        settings: what takes the place of settings in its `cfg.json`.
    """

    repository: str
    folder: str
    scaling_factor: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def locate(release: str, sae_id: str) -> Published:
    """Where the dictionary with an id in a release is.

    If the package sae_lens is installed its table is used, which has every release; rules for the best-known ones are here. Any
    other name is the id of a repository, OWNER/NAME, and the id a folder in it. Raises ValueError for an unknown release, and for
    an id that it does not have, with those that come near.

    >>> locate("gpt2-small-res-jb", "blocks.8.hook_resid_pre").repository
    'jbloom/GPT2-Small-SAEs-Reformatted'
    >>> locate("llama_scope_lxr_8x", "l15r_8x").folder
    'Llama3_1-8B-Base-L15R-8x'
    """
    listed = _table_of_saelens().get(release)
    if listed is not None:
        return _listed(release, listed, sae_id)
    for names, pattern, repository, folder in _rules(release):
        if found := re.fullmatch(pattern, sae_id):
            parts = *names, *found.groups()
            return Published(repository.format(*parts), folder.format(*parts))
    if patterns := [pattern for _, pattern, _, _ in _rules(release)]:
        raise ValueError(f"{release!r} has no dictionary {sae_id!r}: its ids match {' or '.join(patterns)}")
    if release.count("/") == 1:
        return Published(release, sae_id)
    known = releases()
    near = get_close_matches(release, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(
        f"no release {release!r} is known, and there is no such folder. {hint}Known are {', '.join(known)}; with the package "
        "sae-lens installed also its others. A repository of the hub has an OWNER/NAME, and a folder of it as the id"
    )


def releases() -> list[str]:
    """The names of the releases that are known."""
    ours = [name for template, *_ in RULES for name, _ in _names(template)]
    return list(dict.fromkeys([*ours, *_table_of_saelens()]))


def canonical(folder: str, files: Iterable[str]) -> str:
    """The folder that "LAYER/WIDTH/canonical" means among the files of a repository: the one with the average L0 closest to 100.

    >>> canonical(
    ...     "layer_0/width_16k/canonical",
    ...     [f"layer_0/width_16k/average_l0_{n}/params.npz" for n in (46, 105, 137)],
    ... )
    'layer_0/width_16k/average_l0_105'
    """
    above, _, last = folder.rpartition("/")
    if last != "canonical":
        return folder
    numbers = {int(found[1]) for file in files if (found := re.match(rf"{re.escape(above)}/average_l0_(\d+)/", file))}
    if not numbers:
        raise ValueError(f"there is no folder {above}/average_l0_..., of which {folder!r} would be one")
    least = min(abs(number - 100) for number in numbers)
    near = [f"{above}/average_l0_{number}" for number in sorted(numbers) if abs(number - 100) == least]
    if len(near) > 1:
        raise ValueError(
            f"{folder!r} could be {' or '.join(near)}, which are as close to an L0 of 100: give one of them"
        )
    return near[0]


def _rules(release: str) -> list[tuple[tuple[str, ...], str, str, str]]:
    """The rules of a release, each with the alternatives of its name."""
    return [(parts, *rest) for template, *rest in RULES for name, parts in _names(template) if name == release]  # type: ignore[misc]


def _names(template: str) -> list[tuple[str, tuple[str, ...]]]:
    """The names that a template with {alternatives} means, each with its alternatives."""
    texts, choices = re.split(r"\{.*?\}", template), [found.split(",") for found in re.findall(r"\{(.*?)\}", template)]
    return [("".join(a + b for a, b in zip(texts, (*parts, ""), strict=True)), parts) for parts in product(*choices)]


@cache
def _table_of_saelens() -> dict[str, Any]:
    """The releases in the table of the package sae_lens; none if it is not installed."""
    spec = find_spec("sae_lens")
    file = Path(spec.origin).with_name(TABLE) if spec is not None and spec.origin else None
    if file is None or not file.exists():
        return {}
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in seconds, or in half a minute
    return dict(yaml.load(file.read_text(encoding="utf-8"), loader))


def _listed(release: str, entry: Mapping[str, Any], sae_id: str) -> Published:
    """A dictionary of the table of sae_lens."""
    by_id = {each["id"]: each for each in entry["saes"]}
    if sae_id not in by_id:
        near = get_close_matches(sae_id, by_id, n=3, cutoff=0.3) or list(by_id)[:3]
        raise ValueError(
            f"{release!r} has no dictionary {sae_id!r}, but {len(by_id)} others, such as {', '.join(near)}"
        )
    found = by_id[sae_id]
    settings = {**entry.get("config_overrides", {}), **found.get("config_overrides", {})}
    return Published(entry["repo_id"], found["path"], found.get("norm_scaling_factor"), settings)
