"""`models`: the architectures that load."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.output import say, show_table


@command("hooked-lm models 'Llama 3.1'")
def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A part of a name, such as llama; or a hub id or folder, of which only the config is read."
        ),
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="List those of transformers that do not load, and why.")
    ] = False,
) -> Result:
    """List the architectures that load, or say whether a checkpoint does.

    Each is listed by the model_type of its config, with the class that loads it, and models that people know.
    """
    if missing:
        from hooked_lm.hub.unsupported import missing as reasons_of_missing

        reasons = reasons_of_missing()
        chosen = {kind: why for kind, why in reasons.items() if name is None or name.lower() in kind}
        show_table([{"model_type": kind, "why not": why} for kind, why in chosen.items()])
        return {"missing": [{"model_type": kind, "reason": why} for kind, why in chosen.items()]}
    is_path = name is not None and ("/" in name or Path(name).is_dir())
    rows = [] if is_path else _listed(name)
    return {"models": rows} if rows or name is None else _checkpoint(name)


def _listed(name: str | None) -> list[dict[str, Any]]:
    """The model types whose names have this part, all for None."""
    from hooked_lm.families import model_classes, of_other_packages
    from hooked_lm.families.well_known import WELL_KNOWN, found

    classes = model_classes()
    chosen = [kind for kind in classes if name is None or name.lower() in kind.lower() or kind in found(name)]
    rows = [{"model_type": kind, "classes": list(classes[kind]), "models": WELL_KNOWN.get(kind, "")} for kind in chosen]
    for kind, package, model_class, problem in of_other_packages():
        if name is None or name.lower() in kind.lower():
            row = {"model_type": kind, "classes": [model_class] if model_class else [], "models": f"of {package}"}
            rows.append(row if problem is None else {**row, "problem": problem})
    if rows:
        show_table(
            [
                {
                    "model_type": row["model_type"],
                    "class": " or ".join(row["classes"]),
                    "models": row.get("problem", row["models"]),
                }
                for row in rows
            ]
        )
    return rows


def _checkpoint(name: str) -> Result:
    """Whether a checkpoint loads, by its config."""
    from hooked_lm.hub.load import described
    from hooked_lm.pretrained import class_of

    try:
        found = described(name, class_of)
    except ValueError as error:
        if rows := _listed(name.rpartition("/")[2]):  # of a hub that cannot be reached
            say(f"[yellow]its config cannot be read, so this is by the name alone:[/] {escape(str(error))}")
            return {"model": name, "config_read": False, "reason": str(error), "models": rows}
        raise ValueError(f"no model that loads has {name!r} in its name; and as a checkpoint: {error}") from error
    kind = f" (model_type {found['model_type']})" if "model_type" in found else ""
    if found["loads"]:
        packed = f"; its weights are dequantised from {escape(how)}" if (how := found.get("dequantized_from")) else ""
        say(f"{escape(name)} loads as {' or '.join(found['classes'])}{kind}{packed}")
    else:
        say(f"{escape(name)} does not load{kind}: {escape(found['reason'])}")
    return {"model": name, **found}
