"""`models`: the architectures that load."""

from typing import Annotated

import typer

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.output import show_table


@command("hooked-lm models --missing")
def models(
    missing: Annotated[
        bool, typer.Option("--missing", help="List those of transformers that do not load, and why.")
    ] = False,
) -> Result:
    """List the architectures that load.

    Each is listed by the model_type of its config, with the class that loads it.
    """
    if missing:
        from hooked_lm.hub.unsupported import missing as reasons_of_missing

        reasons = reasons_of_missing()
        show_table([{"model_type": name, "why not": why} for name, why in reasons.items()])
        return {"missing": [{"model_type": name, "reason": why} for name, why in reasons.items()]}
    from hooked_lm.families import model_classes

    classes = model_classes()
    show_table([{"model_type": name, "class": " or ".join(found)} for name, found in classes.items()])
    return {"models": [{"model_type": name, "classes": list(found)} for name, found in classes.items()]}
