"""Interactive views: small documents of HTML that notebooks and browsers show, and pages hold."""

import base64
import gzip
import html
import json
import os
import sys
import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from hooked_lm.files import replacing
from hooked_lm.viz.theme import css

UNPACK = """
async function unpacked(packed) {  // the bytes of gzip in base64
  if (typeof DecompressionStream === "undefined")
    throw new Error("This browser is too old for the pictures of this page: they need Chrome 80, Safari 16.4 or Firefox 113.");
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
"""
TELL_HEIGHT = """
function tellHeight() {  // to the page that holds the frame
  if (parent === window) return;
  const height = Math.ceil(document.body.getBoundingClientRect().height);
  parent.postMessage({hookedViewHeight: height}, "*");
}
new ResizeObserver(tellHeight).observe(document.body);
addEventListener("load", tellHeight);  // browsers do not render, so not observe, a frame out of sight
addEventListener("message", tellHeight);  // a page that was not listening yet asks
"""
FRAMES = """  // Frames have the heights of their views.
if (!window.hookedViews) {
  window.hookedViews = true;
  addEventListener("message", event => {
    const frame = [...document.querySelectorAll("iframe.view")].find(each => each.contentWindow === event.source);
    const height = Number(event.data && event.data.hookedViewHeight);
    if (frame && height > 0) frame.style.height = `${Math.min(height, 20000)}px`;
  });
}
for (const frame of document.querySelectorAll("iframe.view"))
  frame.contentWindow.postMessage("height", "*");  // for views that sent it before
if (frameElement) document.documentElement.style.colorScheme = "light dark";  // marimo: that of the page around this document
"""
# Views are light or dark as the notebook that shows them: JupyterLab, VS Code and Colab say which they are.
THEMES = """
[data-jp-theme-light="true"] iframe.view, .vscode-light iframe.view, [theme="light"] iframe.view { color-scheme: light; }
[data-jp-theme-light="false"] iframe.view, .vscode-dark iframe.view, [theme="dark"] iframe.view { color-scheme: dark; }
"""
# marimo puts outputs with scripts into documents of their own, which tell their heights in standards mode alone.
STANDARDS_MODE = "<!DOCTYPE html>"
UNTRUSTED = "To see this view, run the cell or trust the notebook."
BASE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-font-smoothing: antialiased; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
"""
VIEW = "body { padding: 8px; font: 14px/1.5 var(--sans); overflow-x: auto; }\n"
DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


@dataclass(frozen=True, repr=False)
class View:
    """A small document of HTML with its own style and script, isolated from whatever shows it.

    A notebook shows it in a frame; `show()` opens it in a browser, `write_html(path)` saves it, and a page of `viz.report` may
    hold it as a part. It loads nothing. Colours follow the theme of the notebook (JupyterLab, VS Code, Colab, marimo), and
    elsewhere the reader's preference, light or dark, if the style takes them from the variables of `viz.theme`, such as
    `var(--ink)`.

    Args:
        title: the title, as plain text.
        body: HTML, with text escaped.
        style: CSS. Heights must not depend on the height of the window, which follows that of the body.
        script: JavaScript, run after the body. `await unpacked(text)` reads what `packed` wrote; `tellHeight()` measures the
            body at once.
        height: pixels of the frame until the script of the view has measured its body.
        text: what a terminal shows instead, one line.

    >>> view = View("A greeting", "<b>Hello</b>", text="2 words")
    >>> view
    View('A greeting', 2 words; .show() opens it in a browser, .write_html(path) saves it)
    >>> "<b>Hello</b>" in view.to_html()
    True
    """

    title: str
    body: str
    style: str = ""
    script: str = ""
    height: int = 420
    text: str = ""

    def to_html(self) -> str:
        """The whole document."""
        return document(self.title, self.body, VIEW + self.style, UNPACK + TELL_HEIGHT + self.script)

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the document to a file, atomically, and returns its path. Raises OSError if it cannot be written."""
        with replacing(path) as unfinished:
            unfinished.write_text(self.to_html(), encoding="utf-8")
        return Path(path)

    def show(self) -> None:
        """Shows the view in the notebook, or in a browser outside of notebooks; prints the file's path if there is no browser."""
        if _in_notebook():
            sys.modules["IPython"].display.display(self)
            return
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="hooked_lm-", delete=False, encoding="utf-8"
        ) as file:
            file.write(self.to_html())
        if not webbrowser.open(Path(file.name).as_uri()):
            print(f"no browser was found; the page is in {file.name}")

    def _repr_html_(self) -> str:
        return f"{STANDARDS_MODE}<style>{THEMES}</style>{self.frame()}<script>{FRAMES}</script>"

    def frame(self) -> str:
        """The HTML of a frame that shows the view, cut off from the document around it.

        Notebooks that are not trusted remove the frame and keep the text in it.
        """
        return (
            f'<iframe class="view" title="{html.escape(self.title)}" sandbox="allow-scripts" '
            f'srcdoc="{html.escape(self.to_html())}" '
            f'style="width:100%;height:{self.height}px;border:0">{UNTRUSTED}</iframe>'
        )

    def __repr__(self) -> str:
        about = ", ".join(filter(None, [repr(self.title), self.text]))
        return f"View({about}; .show() opens it in a browser, .write_html(path) saves it)"


def document(title: str, body: str, style: str = "", script: str = "") -> str:
    """A page of HTML that loads nothing, by its content security policy; `title` is plain text, the rest HTML, CSS, JavaScript.

    >>> document("a < b", "<p>text</p>").count("a &lt; b")
    1
    """
    return DOCUMENT.format(title=html.escape(title), body=body, style=css() + BASE + style, script=script)


def as_json(value: object) -> str:
    """A value as JSON that can stand in a script of a page: no text in it ends the script.

    >>> as_json(["</script>"])
    '["\\\\u003c/script>"]'
    """
    return (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
    )


def packed(data: bytes | str) -> str:
    """Compressed bytes as text (gzip in base64); the JavaScript function `unpacked` of views and pages restores them.

    >>> gzip.decompress(base64.b64decode(packed("text")))
    b'text'
    """
    data = data.encode() if isinstance(data, str) else data
    compressed = gzip.compress(data, 5, mtime=0)  # in half the time of 9, to 1% more bytes
    return base64.b64encode(compressed).decode("ascii")


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
