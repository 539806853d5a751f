"""Makes the environments of the Makefile: `python3 tests/environment.py FOLDER WHAT...`, with what pip would be told to install.

The folder is made if it is missing, and made anew if an earlier run did not finish: nothing half-installed is kept. The packages
have the versions of constraints.txt; after --oldest or --newest those that the package itself depends on have the oldest version
that pyproject.toml allows, or the newest. They come from uv where it is installed and works, else from pip.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 (whatever Python there is runs this file)
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"error: Python 3.10 or newer is needed, and {sys.executable} is {found}: make ... PYTHON=python3.12")

RECENT_PIP = (25, 0)  # older ones choose versions slowly, and before 21.3 none can install a project with -e
ENDS = ("--oldest", "--newest")
BROUGHT_ALONG = ("huggingface_hub", "sympy", "tokenizers")  # torch and transformers need certain versions of them
OWN_SOURCES = re.compile(r"\.(index-url|extra-index-url|find-links|no-index)=")


def main(folder: Path, what: list[str]) -> None:
    python, unfinished, constraints = folder / "bin" / "python", folder / ".unfinished", Path("constraints.txt")
    try:
        make(folder, python, unfinished)
        if what[0] in ENDS:
            constraints = folder / "constraints.txt"
            constraints.write_text(at_the_end(what.pop(0)))
    except OSError as error:
        sys.exit(f"error: {folder} cannot be written ({error.strerror}): work in a clone that is your own")
    code = 0 if install_by_uv(python, constraints, what) else install_by_pip(python, constraints, what)
    if code >= 0:  # nobody killed it
        unfinished.unlink()
    if code:
        sys.exit("error: pip failed, as it says above: run make again when that is settled")


def make(folder: Path, python: Path, unfinished: Path) -> None:
    """Makes the environment unless there is one. It holds `unfinished` until everything is installed."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if not is_new and (unfinished.exists() or pip_version(python) is None):
        print(f"{folder} is incomplete, as an interrupted run leaves it: it is made anew", flush=True)
        is_new = True
    if is_new and subprocess.run([sys.executable, "-m", "venv", "--clear", folder]).returncode:
        sys.exit(f"error: {sys.executable} -m venv failed: install what it names above, and run make again")
    unfinished.touch()


def pip_version(python: Path) -> tuple[int, ...] | None:
    """The version of an environment's pip; None if either does not run."""
    try:
        done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    return None if found is None or done.returncode else (int(found[1]), int(found[2]))


def at_the_end(end: str) -> str:
    """constraints.txt with the dependencies of the package at one end of their range, and without what these bring along."""
    project = Path("pyproject.toml").read_text()
    dependencies = project.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    oldest = dict(re.findall(r'^ +"([\w-]+)>=([\d.]+)', dependencies, re.MULTILINE))
    lines = Path("constraints.txt").read_text().splitlines()
    kept = [line for line in lines if re.split("[= ]", line)[0].lower() not in {*oldest, *BROUGHT_ALONG}]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in oldest.items() if end == "--oldest"), ""])


def install_by_uv(python: Path, constraints: Path, what: list[str]) -> bool:
    """Whether uv has installed it. On a machine without a GPU it takes the build of PyTorch without CUDA.

    uv ignores the settings of pip: where these name an index or a folder of wheels, pip installs.
    """
    uv = shutil.which("uv")
    if uv is None:
        return False
    settings = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    if OWN_SOURCES.search(settings):
        return False
    print(f"uv installs {' '.join(what)}; the first time takes minutes", flush=True)
    backend = os.environ.get("UV_TORCH_BACKEND", "auto")
    options = ["--quiet", "--python", python, "--torch-backend", backend, "-c", constraints]
    if subprocess.run([uv, "pip", "install", *options, *what]).returncode == 0:
        return True
    print("uv failed, as it says above: pip installs instead", flush=True)
    return False


def install_by_pip(python: Path, constraints: Path, what: list[str]) -> int:
    """The exit code. Modules are compiled when they are first imported: most of them never are."""
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    hint = "" if shutil.which("uv") else " (uv is quicker, if you install it)"
    print(f"pip installs {' '.join(what)}; the first time takes minutes{hint}", flush=True)
    if (pip_version(python) or RECENT_PIP) < RECENT_PIP:
        print("this pip is old and slow: it is upgraded first", flush=True)
        subprocess.run([*install, "--upgrade", "pip"])  # where that fails, the old one may still do
    return subprocess.run([*install, "--no-compile", *what]).returncode


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit("interrupted: the next run of make begins again")
