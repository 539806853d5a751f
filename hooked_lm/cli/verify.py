"""`verify`: a checkpoint here and in transformers."""

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.options import ModelArgument
from hooked_lm.cli.output import say, show_table


@command("hooked-lm verify demo")
def verify(model: ModelArgument) -> Result:
    """Compare a checkpoint with transformers.

    Both load it and run on random texts and images. The exit code is 1 if their outputs disagree.
    """
    from hooked_lm import hub

    verification = hub.verify(model)
    checks = [
        {
            "check": check.name,
            "largest error": check.largest,
            "allowed": check.tolerance,
            "": "ok" if check.ok else "FAILED",
        }
        for check in verification.checks
    ]
    show_table(checks, {"largest error": ".1e", "allowed": ".0e"}, title=model)
    if not verification.ok:
        say(f"[bold red]{len(verification.failed)} of {len(verification.checks)} checks failed[/]")
    return {
        "ok": verification.ok,
        "model": model,
        "checks": [
            {"check": check.name, "largest_error": check.largest, "allowed": check.tolerance, "ok": check.ok}
            for check in verification.checks
        ],
    }
