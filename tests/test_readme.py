"""The snippets of the README and of the pages that have some run, one after the other, as a reader would type them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.close import assert_close

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import snippets as of_pages  # noqa: E402


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def test_every_snippet_of_the_readme_runs(capsys):
    found = snippets((ROOT / "README.md").read_text())
    assert len(found) == 13  # twelve of the tour, one of other models
    namespace: dict[str, object] = {}
    for number, code in enumerate(found, 1):
        exec(compile(code, f"README snippet {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "gave a drink to Mary" in printed


def test_the_calls_for_agents_run(capsys):
    text = (ROOT / "AGENTS.md").read_text()
    [calls] = snippets(text)
    namespace: dict[str, Any] = {}
    exec(compile(calls, "AGENTS.md", "exec"), namespace)
    assert "Tom left early because she was" in capsys.readouterr().out
    assert len(re.findall(r"# \d+\.", calls)) == 10
    for page in re.findall(r"`(docs/[\w-]+\.md)`", text):
        assert (ROOT / page).exists(), page
    [results] = [" ".join(part.split()) for part in text.split("\n\n") if part.startswith("`sweep`")]
    promises = [sentence.split(" have ") for sentence in results.split(". ")[:2]]
    names, promised = zip(
        *[(re.findall(r"`(\w+)`", who), re.findall(r"`\.(\w+)", what)) for who, what in promises], strict=True
    )
    assert (len(promised[0]), len(promised[1])) == (8, 3)
    said = [
        (namespace[name], attribute)
        for some, each in zip(names, promised, strict=True)
        for name in some
        for attribute in each
    ]
    parts = re.findall(r"`(\w+)\.(\w+)`", promises[1][1])
    assert len(parts) == 2
    said += [(getattr(namespace[name], part), attribute) for name, part in parts for attribute in promised[0]]
    assert not [(type(found).__name__, attribute) for found, attribute in said if not hasattr(found, attribute)]


def test_the_contributions_of_the_readme_sum_to_the_logit_difference():
    found = snippets((ROOT / "README.md").read_text())
    namespace: dict[str, Any] = {}
    for code in (found[0], next(code for code in found if "logit_attrs" in code)):
        exec(code, namespace)
    model, logits = namespace["model"], namespace["model"](namespace["prompt"])[0, -1]
    right, wrong = model.to_single_token(" Mary"), model.to_single_token(" John")
    bias = model.b_U[right] - model.b_U[wrong]
    assert_close(namespace["difference"].sum() + bias, logits[right] - logits[wrong], scale=logits.abs().max())


PAGES = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text()]
PAGES.remove("command-line.md")  # its snippets read files that its commands write


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # some write files
    for file in (ROOT / "docs").glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)  # that lie beside a page
    text = (ROOT / "docs" / page).read_text()
    assert len(snippets(text)) == text.count("```python"), "each ends with ``` at the beginning of a line"
    namespace: dict[str, Any] = {}
    blocks = zip(of_pages.snippets(text), of_pages.facts(text), strict=True)
    found = [(code, facts) for (language, code), facts in blocks if language == "python"]
    assert sum(len(facts) for _, facts in found) == text.count("<!-- fact: "), "facts stand right below their snippet"
    for number, (code, facts) in enumerate(found, 1):
        of_pages.execute(code, f"{page}, snippet {number}", namespace)
        of_pages.check(facts, f"{page}, snippet {number}", namespace)


@pytest.mark.slow
def test_every_line_of_the_porting_tables_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # one writes a file
    text = (ROOT / "docs" / "porting-tables.md").read_text()
    cells = [row.rsplit("|", 2)[1] for row in re.findall(r"^\|.*\|$", text, flags=re.M)]
    lines = [found.group(1) for cell in cells if (found := re.match(r"\s*`([^`]+)`", cell))]
    assert len(lines) == len(re.findall(r"^\|", text, flags=re.M)) - 2 * text.count("\n|---|")
    namespace: dict[str, object] = {}
    for code in snippets(text) + lines:
        exec(compile(code, code, "exec"), namespace)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        made_by_the_build = target.startswith("api/")
        assert made_by_the_build or (page.parent / target).exists(), target


def test_what_the_readme_links_to_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_report_of_make_demo_is_ignored_by_git():
    [folder] = re.findall(r"hooked-lm demo --output (\w+/)\w+\.html", (ROOT / "Makefile").read_text())
    assert folder in (ROOT / ".gitignore").read_text().split()
    assert folder + "hooked_lm_demo.html" in (ROOT / "README.md").read_text()
