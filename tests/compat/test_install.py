"""The shim is put on the import path, and never hides an installed package: tested in processes of their own, as imports stay."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core import thinned

ROOT = Path(__file__).parents[2]
THEIRS = '"""Another package of that name."""\nWHO = "theirs"\n'


def run(*arguments: str, path: Path | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a process that can import this project, and optionally other packages."""
    found = [str(ROOT), *([] if path is None else [str(path)])]
    environment = {"PYTHONPATH": ":".join(found), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages with another `transformer_lens`."""
    package = tmp_path / "site" / "transformer_lens"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(THEIRS)
    about = tmp_path / "site" / "transformer_lens-2.16.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-lens\nVersion: 2.16.1\n")
    return package.parent


@pytest.mark.slow
def test_a_program_finds_our_classes_under_the_lent_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, subprocess, importlib.metadata\n"
        "import beside\n"
        "import transformer_lens as tl\n"
        "from transformer_lens import HookedTransformer\n"
        "from transformer_lens.hook_points import HookPoint\n"
        "import transformer_lens.HookedTransformer, hooked_lm\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--steps', '3'], sys.argv\n"
        "assert tl.HookedTransformer is HookedTransformer is hooked_lm.HookedTransformer\n"
        "assert HookPoint is hooked_lm.HookPoint\n"
        "assert importlib.metadata.version('transformer-lens') == tl.__version__ == '3.9.0'\n"
        "sizes = dict(n_layers=1, d_model=8, n_ctx=4, d_head=4, n_heads=2, d_vocab=5, attn_only=True)\n"
        "assert tl.HookedTransformerConfig(**sizes).fused_attention == 'never'\n"
        "assert tl.HookedTransformerConfig(**sizes, fused_attention='auto').fused_attention == 'auto'\n"
        "child = 'import transformer_lens; print(transformer_lens.HookedTransformer.__module__)'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout)\n"
    )
    (tmp_path / "beside.py").write_text("")
    done = run("-m", "hooked_lm.compat", str(script), "--steps", "3", cwd=tmp_path)
    assert done.stdout.strip() == "hooked_lm.pretrained", done.stderr


@pytest.mark.slow
def test_a_module_runs_too(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys, transformer_lens\nprint(transformer_lens.__doc__[:3], sys.argv[1:])\n"
    )
    done = run("-m", "hooked_lm.compat", "-m", "tool", "a", cwd=tmp_path)
    assert done.stdout.strip() == "The ['a']", done.stderr


@pytest.mark.parametrize("given", thinned(["", "--shadow", "-m", "--help"], keep=["-m"]))
def test_how_it_is_used(given: str) -> None:
    done = run("-m", "hooked_lm.compat", *given.split())
    wanted = given == "--help"
    assert done.returncode == (0 if wanted else 1)
    assert "usage: python -m hooked_lm.compat" in (done.stdout if wanted else done.stderr)


@pytest.mark.slow
def test_an_installed_package_is_not_shadowed_unless_asked(installed: Path) -> None:
    who = "import transformer_lens; print(getattr(transformer_lens, 'WHO', 'ours'))"
    refused = run("-c", f"from hooked_lm import compat; compat.install(); {who}", path=installed)
    assert refused.returncode == 1
    assert "transformer_lens 2.16.1 is installed" in refused.stderr
    assert "shadow=True" in refused.stderr
    left = f"""
from hooked_lm import compat
try:
    compat.install()
except RuntimeError:
    {who}
"""
    assert run("-c", left, path=installed).stdout.strip() == "theirs", "something was left behind"
    shadowing = run("-c", f"from hooked_lm import compat; compat.install(shadow=True); {who}", path=installed)
    assert shadowing.stdout.strip() == "ours", shadowing.stderr


@pytest.mark.slow
def test_a_program_may_shadow_it_too(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import transformer_lens\nprint(getattr(transformer_lens, 'WHO', 'ours'))\n")
    assert "is installed" in run("-m", "hooked_lm.compat", str(script), path=installed).stderr
    assert run("-m", "hooked_lm.compat", "--shadow", str(script), path=installed).stdout.strip() == "ours"


def test_too_late_is_said(installed: Path) -> None:
    late = "import transformer_lens; from hooked_lm import compat; compat.install(shadow=True)"
    done = run("-c", late, path=installed)
    assert "already imported from" in done.stderr
    assert "transformer_lens/__init__.py" in done.stderr


@pytest.mark.slow
def test_it_is_taken_back() -> None:
    code = """
import sys
from hooked_lm import compat
before = list(sys.path)
compat.install()
compat.install()
from transformer_lens import HookedTransformer
import transformer_lens.utils
compat.uninstall()
assert sys.path == before
assert not [name for name in sys.modules if name.startswith("transformer_lens")]
try:
    import transformer_lens
except ImportError:
    print("gone")
"""
    done = run("-c", code)
    assert done.stdout.strip() == "gone", done.stderr


def test_nothing_else_of_the_package_knows_of_it() -> None:
    done = run(
        "-c",
        "import sys, hooked_lm.cli; print([name for name in sys.modules if 'compat' in name and 'hooked_lm' in name])",
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_what_is_recorded_changes_no_bit() -> None:
    """In a program for HookedTransformer: plain, cached and hooked runs of models like GPT-2, Llama and Gemma 2, also with sites
    that flags switch on."""
    done = run("-m", "hooked_lm.compat", str(Path(__file__).with_name("recorded.py")))
    kinds = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in kinds] == ["gpt2", "llama", "gemma2"], done.stderr
    for _, *n_runs in kinds:
        bare, flagged = map(int, n_runs)
        assert 80 < bare < flagged


@pytest.mark.parametrize(
    ("name", "says"), [("missing.py", "no such file: 'missing.py'"), ("some.ipynb", "is a notebook: call")]
)
def test_what_is_no_script(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "some.ipynb").write_text("{}")
    done = run("-m", "hooked_lm.compat", name, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
