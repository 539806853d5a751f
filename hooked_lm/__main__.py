"""The command `hooked-lm`, also as `python -m hooked_lm`."""

import os
import sys


def main() -> None:
    """Runs the command line; progress bars are for terminals."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from hooked_lm.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: this needs the package {error.name}: pip install 'hooked-lm[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="hooked-lm")


if __name__ == "__main__":
    main()
