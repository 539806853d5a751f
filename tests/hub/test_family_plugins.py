"""Families of other packages, which entry points name: that of demos/family_plugin, and broken ones."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hooked_lm import HookedTransformer, hub
from hooked_lm.cli.models import models as listed
from hooked_lm.families import family, is_supported, model_class, of_other_packages
from hooked_lm.hub.load import described
from hooked_lm.pretrained import class_of
from tests.close import assert_close

TEMPLATE = Path(__file__).parents[2] / "demos" / "family_plugin"
Install = Callable[..., None]

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package on the path as an installer would: its metadata, and its modules by name; nothing is installed."""
    site = tmp_path / "site"
    before = set(sys.modules)

    def put(package: str, entry_points: str, **modules: str) -> None:
        metadata = site / f"{package}-0.1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(f"[hooked_lm.families]\n{entry_points}\n")
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)

    site.mkdir()
    monkeypatch.syspath_prepend(site)
    yield put
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("scaled_llama", "broken", "partial", "other"):
            del sys.modules[name]


@pytest.fixture
def template(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package in demos/family_plugin, with the entry points of its pyproject.toml."""
    text = (TEMPLATE / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."hooked_lm.families"]\n')[2]
    install("scaled_llama", "\n".join(re.sub(r'"([^"]*)".*', r"\1", line) for line in section.splitlines()))
    monkeypatch.syspath_prepend(TEMPLATE)


@pytest.fixture
def checkpoint(template: None, tmp_path: Path) -> Path:
    from scaled_llama.model import ScaledLlamaConfig, ScaledLlamaForCausalLM

    torch.manual_seed(0)
    ScaledLlamaForCausalLM(ScaledLlamaConfig(**SIZES, embedding_scale=3.0)).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_checkpoint_loads_and_agrees_with_transformers(checkpoint: Path):
    model = HookedTransformer.from_pretrained_no_processing(checkpoint)
    tokens = torch.tensor([[1, 7, 9, 4]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_close(model(tokens), theirs(tokens).logits)
    assert model.cfg.tree.embed.scale == 3.0
    assert type(theirs).__name__ == "ScaledLlamaForCausalLM"
    verification = hub.verify(checkpoint)
    assert verification.ok, verification


def test_it_is_exported_and_described(checkpoint: Path, tmp_path: Path):
    model = HookedTransformer.from_pretrained_no_processing(checkpoint)
    model.save_pretrained(tmp_path / "again")
    again = HookedTransformer.from_pretrained_no_processing(tmp_path / "again")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    says = {"loads": True, "model_type": "scaled_llama", "classes": ["HookedTransformer"]}
    assert described(checkpoint, class_of) == says


@pytest.mark.every_parameter
def test_a_field_that_the_family_does_not_read_is_refused(checkpoint: Path):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"twist": 2.0}))
    with pytest.raises(ValueError, match=r"fields of this scaled_llama config .*twist=2.0"):
        HookedTransformer.from_pretrained(checkpoint)


def test_it_is_imported_when_it_is_asked_for(template: None):
    assert is_supported("gpt2")
    assert "scaled_llama.family" not in sys.modules
    assert is_supported("scaled_llama")
    assert not is_supported("scaled_llama", "HookedEncoder")
    assert model_class("scaled_llama") == "HookedTransformer"
    assert "scaled_llama.family" in sys.modules


def test_the_list_has_it(template: None, capsys: pytest.CaptureFixture[str]):
    assert of_other_packages() == [
        ("scaled_llama", "scaled_llama 0.1.0 (scaled_llama.family)", "HookedTransformer", None)
    ]
    assert listed("scaled_ll")["models"] == [
        {
            "model_type": "scaled_llama",
            "classes": ["HookedTransformer"],
            "models": "of scaled_llama 0.1.0 (scaled_llama.family)",
        }
    ]
    assert "HookedTransformer" in capsys.readouterr().out


WHOLE = "PREFIX = ''\nIGNORED = ()\ndef config(hf): ...\ndef rows(tree): ...\n"


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "import no_such_module",
            r"broken 0\.1\.0 \(broken\) cannot be imported: ModuleNotFoundError: .*no_such_module",
        ),
        ("1 / 0", r"cannot be imported: ZeroDivisionError"),
        ("PREFIX = ''\nIGNORED = ()\ndef config(hf): ...", r"broken 0\.1\.0 \(broken\) lacks rows \(a function\)"),
        (WHOLE.replace("()", "'*'", 1), r"lacks IGNORED \(a tuple\)"),
        (
            WHOLE + "MODEL_CLASS = 'HookedThing'",
            r"has MODEL_CLASS='HookedThing'; it must be one of HookedTransformer, ",
        ),
    ],
)
def test_a_broken_one_names_itself_and_breaks_no_other(install: Install, text: str, problem: str):
    install("broken", "their_type = broken", broken=text)
    with pytest.raises(ValueError, match=problem):
        family("their_type")
    [(kind, package, name, why)] = of_other_packages()
    assert (kind, package, name) == ("their_type", "broken 0.1.0 (broken)", "")
    assert re.search(problem, str(why))
    [row] = listed("their_type")["models"]
    assert row["problem"] == why
    assert not is_supported("no_such_type")
    assert family("llama").PREFIX == "model."
    assert "their_type" not in hub.supported()


def test_what_is_no_module_is_refused(install: Install):
    install("broken", "their_type = broken:PREFIX", broken=WHOLE)
    with pytest.raises(ValueError, match="must be a module, got a str"):
        family("their_type")


def test_one_name_in_two_packages_is_refused_with_both(install: Install):
    install("broken", "their_type = broken", broken=WHOLE)
    install("other", "their_type = other\nanother = other", other=WHOLE)
    with pytest.raises(ValueError, match=r"several packages .*(broken 0.1.0 \(broken\).*other|other.*broken)"):
        family("their_type")
    assert is_supported("another")
    assert [problem is None for *_, problem in of_other_packages()] == [True, False, False]


def test_our_family_is_used_before_one_of_the_same_name(install: Install):
    install("broken", "gpt2 = broken", broken="1 / 0")
    assert family("gpt2").PREFIX == "transformer."
    assert not is_supported("gpt2", "HookedEncoder")
    [(*_, problem)] = of_other_packages()
    assert problem == "hooked_lm has a family 'gpt2' itself, which is used"


def test_one_of_another_class(install: Install):
    install("other", "their_type = other", other=WHOLE + "MODEL_CLASS = 'HookedEncoder'")
    assert is_supported("their_type", "HookedEncoder")
    assert not is_supported("their_type", "HookedTransformer")
    assert model_class("their_type") == "HookedEncoder"


def test_a_type_that_transformers_does_not_know(install: Install, tmp_path: Path):
    install("other", "their_type = other", other=WHOLE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "their_type"}))
    with pytest.raises(ValueError, match=r"their_type, which transformers [\d.]+ does not have: .*AutoConfig.register"):
        HookedTransformer.from_pretrained(tmp_path)
