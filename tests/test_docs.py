"""Generated pages are as the code would write them now, every public name is documented, and the site builds."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import markdown
import nbformat
import pytest
import yaml
from typer.main import get_command

from hooked_lm.analysis.rankings import METHODS
from hooked_lm.cli import EXAMPLES, app
from hooked_lm.families import CLASSES, supported
from tests.families import CASES, VISION_CASES

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))

import api  # noqa: E402
import llms  # noqa: E402
import notebooks  # noqa: E402
import papers  # noqa: E402
import snippets  # noqa: E402


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.slow
def test_the_page_of_sites_is_fresh(generate: dict[str, Any]):
    assert (DOCS / "sites.md").read_text() == generate["page"](), "run `make docs`"


def test_the_page_of_the_leaderboard_shows_the_boards_beside_it():
    made = runpy.run_path(str(DOCS / "leaderboard.py"))
    boards = {kind: made["Leaderboard"].load(made["file_of"](kind)) for kind in made["KINDS"]}
    assert (DOCS / "leaderboard.md").read_text() == made["page"](boards), "run `make docs`"
    assert boards["planted"].methods == list(METHODS), "a method was added: run `make docs`"


@pytest.mark.slow
def test_the_table_of_lenses_is_of_prompts_that_they_were_not_fitted_on():
    """And its intervals count thoughts, of which one gives several prompts."""
    subjects = runpy.run_path(str(DOCS / "lenses.py"))["subjects"]()
    _, texts, questions = subjects["two-hop"]
    assert not {*map(tuple, texts.tolist())} & {tuple(row) for one in questions for row in one.prompts.tolist()}
    _, thoughts, questions = subjects["demo-steps"]
    fitted = [thoughts[row].tokens[0].tolist() for row in range(len(thoughts))]
    for one in questions:
        assert len(one.prompts) == len(one.groups) > len({*one.groups})
        assert not any(row[: len(ids)] == ids.tolist() for ids in one.prompts for row in fitted)


@pytest.mark.slow
def test_the_page_of_models_is_fresh(generate: dict[str, Any]):
    """But for the last digits of what was measured."""
    number = re.compile(r"\d\.\de-\d\d")
    shown, now = (DOCS / "models.md").read_text(), generate["models_page"]()
    assert number.sub("#", shown) == number.sub("#", now), "run `make docs`"


def test_the_page_of_config_fields_is_fresh(generate: dict[str, Any]):
    assert (DOCS / "config.md").read_text() == generate["config_page"](), "run `make docs`"


def test_every_family_was_measured():
    parity = json.loads((DOCS / "parity.json").read_text())
    rows = Counter(case.family for case in (*CASES, *VISION_CASES))
    configs = {name: rows[name] for name in sorted(supported(*CLASSES.values())) if name in rows or name in supported()}
    assert {name: found["configs"] for name, found in parity.items()} == configs, "run `make docs`"
    assert [name for name, found in parity.items() if not found["largest"] <= 1e-4] == []


def test_the_page_of_fidelity_is_fresh(generate: dict[str, Any]):
    assert (DOCS / "fidelity.md").read_text() == generate["fidelity_page"](), "run `make docs`"


def test_the_drawing_of_a_block_is_fresh_and_has_every_site_of_it(generate: dict[str, Any]):
    drawing = (DOCS / "images" / "block.svg").read_text()
    assert drawing == generate["drawing_of_a_block"](), "run `make docs`"
    names = [name for name in generate["HookedTransformer"].from_pretrained("demo").all_points() if "blocks.0." in name]
    assert drawing.count('class="point') == len(names) + 2  # and two in the legend
    assert [name for name in names if f">{name.rpartition('.')[2]}</text>" not in drawing] == []


def test_pages_show_every_character_of_their_text():
    """A browser takes `<name>` outside of code for a tag, and in a table `\\|` inside of code keeps its backslash."""
    swallowed, escaped = [], []
    for page in sorted(DOCS.glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        prose = re.sub(r"`[^`]*`", "", text)
        swallowed += [(page.name, tag) for tag in re.findall(r"<(?!/?div\b)[a-zA-Z/][^>\n]*>", prose)]
        escaped += [(page.name, code) for code in re.findall(r"`[^`\n]*\\\|[^`\n]*`", text)]
    assert swallowed == []
    assert escaped == []


def test_code_on_pages_is_at_most_85_columns_wide():
    """So that it fits its column; `ruff format --preview --line-length 85 PAGE` breaks long lines."""
    too_long = []
    for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")):
        blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(), flags=re.M | re.S)
        lines = [line for block in blocks for line in block.splitlines()]
        too_long += [(page.name, line) for line in lines if len(line) > 85]
    assert too_long == []


def test_every_notebook_has_a_page_and_a_card_with_a_picture_in_light_and_dark():
    stored = {path.stem: nbformat.read(path, as_version=4) for path in notebooks.NOTEBOOKS}
    cards = notebooks.gallery(stored)
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for name, notebook in stored.items():
        assert f"- demos/{name}.md\n" in navigation
        assert f"](demos/{name}.md)" in cards
        assert len([cell for cell in notebook.cells if cell.metadata.get("picture")]) == 1, (
            "the cell to draw on the card"
        )
        for image in re.findall(rf"images/notebooks/{name}(?:-dark)?\.png", cards):
            assert (DOCS / image).exists(), "run `make docs`"


def test_a_notebook_becomes_a_page_with_its_outputs_and_links_to_pages():
    code = nbformat.v4.new_code_cell("print('<1>')\nfigure")
    figure = nbformat.v4.new_output("display_data", {notebooks.FIGURE: {"data": []}})
    progress = nbformat.v4.new_output("stream", name="stderr", text="50%")
    code.outputs = [nbformat.v4.new_output("stream", text="<1>\n"), progress, figure]
    texts = map(
        nbformat.v4.new_markdown_cell, ("# Title", "See [another](lenses.ipynb), [a page](../docs/porting.md).")
    )
    text, [output] = notebooks.to_page("one", nbformat.v4.new_notebook(cells=[*texts, code]))
    assert text.startswith("# Title\n\n[Download this notebook](one.ipynb)")
    assert "[another](lenses.md), [a page](../porting.md)" in text
    assert "&lt;1&gt;" in output
    assert 'class="plotly-figure"' in output
    assert "50%" not in output


def test_papers_become_links():
    text = "Wang et al. 2022, arXiv:2211.00593; doi:10.1214/aos/1176344552. Elhage et al.\n2021; `arXiv:1.2` huggingface.co/a/b."
    html = markdown.markdown(f"{text} [arXiv:2211.00593](x.md)", extensions=[papers.Links()])
    assert re.findall('href="(.*?)"', html) == [
        "https://arxiv.org/abs/2211.00593",
        "https://doi.org/10.1214/aos/1176344552",
        "https://transformer-circuits.pub/2021/framework/index.html",
        "https://huggingface.co/a/b",
        "x.md",
    ]


@pytest.mark.slow
def test_every_public_name_has_a_docstring_and_a_page():
    assert api.undocumented() == []
    text = "".join(api.page(module) for module in api.MODULES)
    absent = [f"{module}.{name}" for module in api.MODULES for name in api.public_names(module) if name not in text]
    assert absent == []


def test_public_packages_are_in_the_reference():
    """Those with an `__all__`, but for the ones that a user has no reason to import."""
    inside = {"hooked_lm.cli", "hooked_lm.components", "hooked_lm.models", "hooked_lm.families", "hooked_lm.engine"}
    root = DOCS.parent / "hooked_lm"
    packages = {f"hooked_lm.{file.parent.name}" for file in root.glob("*/__init__.py") if "__all__" in file.read_text()}
    assert sorted(packages - inside - set(api.MODULES)) == []
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    assert [module for module in api.MODULES if f"api/{module}.md" not in navigation] == []


def test_the_documentation_for_language_models():
    """Each page of the navigation with what it is about, and all of their text without the facts that are tested."""
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    pages = llms.pages(nav)
    assert {"index.md", "patching.md", "models.md", "architecture.md"} <= {*pages}
    listed = re.findall(r"^- \[(.+?)\]\((.+?)\.html\): (.+)$", llms.short(nav, "In a line."), flags=re.M)
    assert [f"{page}.md" for _, page, _ in listed] == pages
    assert all(title and len(about) > 20 for title, _, about in listed)
    full = llms.full(nav)
    assert full.startswith("# For agents")
    assert "<!--" not in full
    assert all(llms.text_of(page) in full for page in pages)


def test_a_snippet_shows_what_it_prints_and_its_value():
    page = "```python\nprint('<b>')\nx = 1\n```\n\n```python\nx + 1\n```\n\n```python\nfigure = None\nx\n```\n"
    shown = snippets.run_page(page, "a page")
    assert [output.printed for output in shown] == ["<b>\n", "", ""]
    assert "&lt;b&gt;" in shown[0].to_html()
    assert ">2<" in shown[1].value
    with pytest.raises(snippets.SnippetError, match="a page, snippet 2: ZeroDivisionError"):
        snippets.run_page("```python\nx = 1\n```\n\n```python\nx / 0\n```\n", "a page")


def test_a_snippet_is_held_to_what_the_page_states():
    page = "```python\nx = 1\n```\n<!-- fact: x == 1 -->\n<!-- fact: x < {} -->\n\nText.\n\n```python\nx = 2\n```\n"
    assert snippets.facts(page) == [["x == 1", "x < {}"], []]
    assert len(snippets.run_page(page.format(2), "a page")) == 2
    with pytest.raises(snippets.SnippetError, match="a page, snippet 1: it is not true that x < 1"):
        snippets.run_page(page.format(1), "a page")


@pytest.mark.parametrize(
    ("code", "it"),
    [
        ("int('x')\n# raises ValueError: invalid ... base 10:\n# 'x'\n\n# a comment\ny = 2\ny", None),
        ("{}['a b']\n# raises KeyError: a b", None),  # without the quotes of its str
        ("import warnings\nwarnings.warn('old')\n# warns UserWarning: old", None),
        ("if True:\n    int('x')\n# raises TypeError: invalid", "raises ValueError: invalid literal"),
        ("int('x')\n# raises ValueError: valid", "raises ValueError: invalid literal"),
        ("int('1')\n# raises ValueError: ...", "raises and warns of nothing"),
        ("int('1')\n# warns UserWarning: ...", "raises and warns of nothing"),
    ],
)
def test_a_snippet_is_held_to_the_error_below_a_statement(code: str, it: str | None):
    page = f"```python\n{code}\n```\n"
    if it is None:
        [shown] = snippets.run_page(page, "a page")
        assert shown.value == ("" if "y" not in code.split() else snippets.value_to_html(2))
    else:
        with pytest.raises(snippets.SnippetError, match=f"a page, snippet 1: expected .*\nit {it}"):
            snippets.run_page(page, "a page")


def test_a_console_snippet_shows_what_its_commands_print():
    page = "```console\n$ hooked-lm sites demo \\\n    --match 'nothing*'; echo $?\n$ hooked-lm --version\n```\n"
    [shown] = snippets.run_page(page, "a page")
    refused, code, version = shown.printed.splitlines()
    assert refused.startswith("error: no hook point 'nothing*'")
    assert (code, version.split()[0]) == ("2", "hooked-lm")
    with pytest.raises(snippets.SnippetError, match="a page, snippet 1: exit code 2"):
        snippets.run_page("```console\n$ hooked-lm sites demo --match 'nothing*'\n```\n", "a page")
    with pytest.raises(snippets.SnippetError, match="rm is not a command of this package"):
        snippets.run_page("```console\n$ rm -r folder\n```\n", "a page")


def test_every_command_is_on_the_page_of_commands_with_options_that_it_has():
    page = (DOCS / "command-line.md").read_text()
    known = get_command(app).commands
    assert re.findall(r"^## ([a-z]+)$", page, flags=re.M) == list(dict.fromkeys(re.findall(r"\(#([a-z]+)\)", page)))
    assert set(re.findall(r"^## ([a-z]+)$", page, flags=re.M)) == {*EXAMPLES, "mcp"}
    blocks = [code for language, code in snippets.snippets(page) if language == "console"]
    for command in (line for code in blocks for line in snippets.commands(code)):
        _, name, *arguments = shlex.split(command.removesuffix(snippets.SHOW_CODE))
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert [each for each in arguments if each.startswith("--") and each not in options] == [], command


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path):
    """With the outputs of snippets and notebooks, valid links and anchors, and a page for each module; minutes."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("getting-started", "reading", "patching", "attribution", "vision", "pictures"):
        html = (tmp_path / "site" / f"{page}.html").read_text()
        assert 'class="plotly-figure"' in html or "<iframe" in html, f"{page} has no picture"
        assert "https://cdn" not in html
        assert "fonts.g" not in html
        assert not re.findall(r"et\s+al\.\s+\d{4}(?!</a>|,\s+<a)", html), f"{page} names papers without a link"
    reference = (tmp_path / "site" / "api" / "hooked_lm.patching.html").read_text()
    assert 'id="hooked_lm.patching.ablate"' in reference
    assert 'data-output="' not in "".join(file.read_text() for file in (tmp_path / "site").glob("*.html"))
