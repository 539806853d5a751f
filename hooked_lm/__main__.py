"""The command `hooked-lm`, also as `python -m hooked_lm`."""

import gc
import logging
import os
import sys


def main() -> None:
    """Runs the command line; progress bars are for terminals, and what other libraries log is for those who ask for it."""
    gc.set_threshold(10_000)  # not 700: what is imported is no garbage, and the search for it took a sixth of the demo
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from hooked_lm.cli import app

        app(prog_name="hooked-lm")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"failed: this needs the package {error.name}: pip install 'hooked-lm[cli]'", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(130)


if __name__ == "__main__":
    main()
