"""The command `hooked-lm`, also as `python -m hooked_lm`."""

import sys


def main() -> None:
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
