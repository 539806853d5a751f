"""`steer`: steering vectors of two kinds of texts, in the file that `generate --steer` reads."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable, decoder, which
from hooked_lm.cli.options import ModelArgument
from hooked_lm.cli.output import records, say, say_path, show_table
from hooked_lm.cli.prompts_and_sites import short_name

SHOWN = {"layer": "", **dict.fromkeys(("accuracy", "auc", "random_accuracy", "norm", "dose"), ".2f")}


@command(
    "hooked-lm steer demo --out hooked_lm_steer.safetensors \\\n"
    "  --positive 'Mary was tired, so' --positive 'Anna was late, so' \\\n"
    "  --negative 'John was tired, so' --negative 'Paul was late, so'"
)
def steer(
    model: ModelArgument,
    positive: Annotated[list[str], typer.Option(help="A text that has the property; repeat it.")],
    negative: Annotated[list[str], typer.Option(help="The text without it, in the same order; repeat it.")],
    site: Annotated[
        str, typer.Option("--site", "--sites", help="The short name of a site of the residual stream.")
    ] = "resid_post",
    layers: Annotated[str, typer.Option(help="each, or indices such as 0,-1 or 0-2.")] = "each",
    method: Annotated[str, typer.Option(help="mean (of the differences), pca or logistic.")] = "mean",
    out: Annotated[Path, typer.Option("--out", "--output", help="The path of the file.")] = Path(
        "hooked_lm_steer.safetensors"
    ),
) -> Result:
    """Compute steering vectors from pairs of texts, and judge them.

    The vector of a layer leads from the negative to the positive texts, at their last token. The table shows how well it
    separates held-out pairs, beside random vectors. `hooked-lm generate --steer FILE` adds the vectors.
    """
    from hooked_lm.interventions.steering import steering_vectors

    check_writable(out)
    loaded = decoder(model, "steer")
    options: dict[str, Any] = {"site": short_name(site, " and --layers"), "layers": which("layers", layers)}
    vectors = steering_vectors(loaded, positive, negative, method=method, **options)
    vectors.save(out)
    rows, best = records(vectors.to_dataframe()), vectors.best_layer()
    show_table([{name: row[name] for name in SHOWN} for row in rows], SHOWN)
    say(f"layer {best} is steered by default; `dose` is that of a coefficient of 1")
    say_path("vectors:", out)
    return {
        "model": model, "site": vectors.site, "method": method, "n_pairs": len(positive), "best_layer": best, "layers": rows,
        "file": out.resolve()
    }  # fmt: skip
