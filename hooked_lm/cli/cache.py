"""`cache`: activations of a prompt, in a file."""

from pathlib import Path
from typing import Annotated

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable, load
from hooked_lm.cli.options import ModelArgument, PromptArgument, SitesOption
from hooked_lm.cli.output import say_path, show_table
from hooked_lm.cli.prompts_and_sites import prompt_of, sites_of


@command("hooked-lm cache demo 'Mary and John left' --site resid_post \\\n  --out hooked_lm_cache.safetensors")
def cache(
    model: ModelArgument,
    prompt: PromptArgument,
    sites: SitesOption,
    out: Annotated[Path, typer.Option("--out", "--output", help="The path of the file.")] = Path(
        "hooked_lm_cache.safetensors"
    ),
) -> Result:
    """Save the activations of some sites.

    ActivationCache.load(FILE, model) reads the safetensors file.
    """
    check_writable(out)
    loaded = load(model)
    given, words = prompt_of(loaded, prompt)
    _, found = loaded.run_with_cache(given, names_filter=sites_of(loaded, sites), return_type=None)
    found.save(out)
    rows: list[dict[str, object]] = [
        {
            "site": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "bytes": value.nbytes,
        }
        for name, value in found.items()
    ]
    show_table(rows, {"bytes": ",d"})
    say_path(f"{len(words)} tokens, {found.nbytes:,} bytes in", out)
    return {"model": model, "prompt": prompt, "tokens": words, "sites": rows, "file": out.resolve()}
