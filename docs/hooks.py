"""What mkdocs does besides rendering pages: it runs their snippets, puts the outputs below them, and adds the API reference."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import log

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import api  # noqa: E402
import llms  # noqa: E402
import notebooks  # noqa: E402
import papers  # noqa: E402
import snippets  # noqa: E402

OUTPUTS: dict[str, list[str]] = {}  # page -> what each of its blocks shows, as HTML
GALLERY = "<!-- gallery -->"


def on_config(config: Any) -> None:
    """Makes links of papers in the text of pages and of docstrings."""
    config.markdown_extensions.append(papers.Links())


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the API reference, the notebooks, and the scripts that draw figures: plotly's and the package's."""
    from plotly.offline import get_plotlyjs

    missing = api.undocumented()
    if missing:
        raise PluginError(f"public names without a docstring: {', '.join(missing)}")
    for module in api.MODULES:
        files.append(File.generated(config, f"api/{module}.md", content=api.page(module)))
    for path in notebooks.NOTEBOOKS:
        files.append(File.generated(config, f"demos/{path.name}", abs_src_path=str(path)))
    for name, notebook in notebooks.all_executed().items():
        text, OUTPUTS[f"demos/{name}.md"] = notebooks.to_page(name, notebook)
        files.append(File.generated(config, f"demos/{name}.md", content=text))
    files.append(File.generated(config, "assets/plotly.min.js", content=get_plotlyjs()))
    files.append(File.generated(config, "assets/figures.js", content=figure_script()))
    return files


def figure_script() -> str:
    """The script that draws the figures of a page: as the pages of the package do, but on the paper of the documentation."""
    from hooked_lm.viz import page, theme

    light, dark = ({**colours, theme.PAPER: theme.PAPER} for colours in (theme.light_colours(), theme.dark_colours()))
    own = (HERE / "figures.js").read_text(encoding="utf-8")
    tools = Path(page.__file__).with_name("figures.js").read_text(encoding="utf-8")
    return f"{tools}\nconst figureColours = {json.dumps({'light': light, 'dark': dark})};\n{own}"


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Runs the snippets of a page, leaves a mark below each one, links to the pages of notebooks, and shows their gallery."""
    source = page.file.src_uri
    if source == "notebooks.md":
        markdown = notebooks.TABLE.sub(GALLERY, markdown)
    if GALLERY in markdown:
        markdown = markdown.replace(GALLERY, notebooks.gallery(notebooks.all_executed()))
    markdown = re.sub(r"\]\(\.\./demos/(\w+)\.ipynb", r"](demos/\1.md", markdown)
    if source not in OUTPUTS and snippets.snippets(markdown):
        started = time.perf_counter()
        data = (Path(__file__).parent / source).parent.glob(f"{Path(source).stem}_*.safetensors")
        try:
            OUTPUTS[source] = [output.to_html() for output in snippets.run_page(markdown, source, data)]
        except snippets.SnippetError as error:
            raise PluginError(str(error)) from error
        log.info(f"ran the {len(OUTPUTS[source])} snippets of {source} in {time.perf_counter() - started:.1f} s")
    numbers = iter(range(len(OUTPUTS.get(source, []))))
    return snippets.BLOCK.sub(lambda block: f"{block.group()}\n{mark(next(numbers))}\n\n", markdown)


def mark(number: int) -> str:
    """The place of an output in a page."""
    return f'<div data-output="{number}"></div>'


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Puts the outputs into the rendered page, and plotly's script on a page with figures."""
    shown = OUTPUTS.get(page.file.src_uri, [])
    for number, output in enumerate(shown):
        if mark(number) not in html:
            raise PluginError(f"{page.file.src_uri}: the output of snippet {number + 1} has no place in the page")
        html = html.replace(mark(number), output)
    if any("plotly-figure" in output for output in shown):
        root = "../" * page.url.count("/")
        html += f'<script src="{root}assets/plotly.min.js"></script>\n<script src="{root}assets/figures.js"></script>'
    return html


def on_post_build(config: Any) -> None:
    """Writes the documentation for language models."""
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms.short(config.nav, config.site_description), encoding="utf-8")
    (site / "llms-full.txt").write_text(llms.full(config.nav), encoding="utf-8")
