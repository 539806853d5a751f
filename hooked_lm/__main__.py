"""`python -m hooked_lm` is the command `hooked-lm`."""

from hooked_lm.cli import app

if __name__ == "__main__":
    app(prog_name="hooked-lm")
