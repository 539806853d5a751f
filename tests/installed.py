"""Runs in an environment with the package and its base dependencies alone, from the root of a clone: `make dist`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests")]
    import hooked_lm

    home = Path(hooked_lm.__file__).resolve()
    assert Path(sys.prefix).resolve() in home.parents, f"{home} is not what was installed"
    assert files("hooked_lm").joinpath("py.typed").is_file()
    for extra in ("pandas", "plotly"):
        assert find_spec(extra) is None, f"{extra} is installed: this is no base install"
    sweep_without_tables()
    command()
    print(f"hooked-lm {version('hooked-lm')} runs as it was installed in {sys.prefix}")


def sweep_without_tables() -> None:
    """The bundled model, a cache and a sweep need no extra; tables and figures say which."""
    from hooked_lm import HookedTransformer, patching
    from hooked_lm.analysis import metrics

    model = HookedTransformer.from_pretrained("demo")
    clean, corrupted = (f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
    _, cache = model.run_with_cache(clean)
    assert cache["pattern", 0].shape[1] == model.cfg.n_heads
    metric = metrics.logit_difference(" Mary", " John", model=model)
    found = patching.sweep(model, corrupted, clean, metric=metric, sites="z", positions=None, heads="each")
    assert found.mean.shape == (model.cfg.n_layers, model.cfg.n_heads)
    for needing in (found.top, found.to_dataframe, found.plot):
        assert "pip install 'hooked-lm[viz]'" in refusal(needing)


def refusal(needing: Callable[[], object]) -> str:
    """What a call says that lacks its packages."""
    try:
        needing()
    except ImportError as error:
        return str(error)
    raise AssertionError(f"{needing} worked without its packages")


def command() -> None:
    """The entry point answers, whether or not what it needs is there."""
    program = Path(sys.executable).with_name("hooked-lm")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        for arguments in (["--version"], ["doctor"], ["generate", "demo", "The capital of France is", "--greedy"]):
            done = subprocess.run(
                [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if find_spec("typer") is None or find_spec("rich") is None:
                assert done.returncode == 2
                assert "pip install 'hooked-lm[cli]'" in done.stderr
            else:
                assert done.returncode == 0, done.stderr
                assert "Traceback" not in done.stderr


if __name__ == "__main__":
    main()
