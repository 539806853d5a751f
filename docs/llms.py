"""llms.txt, the pages with what each is about, and llms-full.txt, all of their text: the documentation for language models."""

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMENTS = re.compile(r"<!--.*?-->\n?", flags=re.S)


def pages(nav: Any) -> list[str]:
    """The written pages of a navigation, in its order; the reference is made from code, other pages from notebooks."""
    if isinstance(nav, str):
        return [] if nav.startswith(("api/", "demos/")) else [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages(part)]


def text_of(page: str) -> str:
    """The text of a page, without what readers do not see."""
    return COMMENTS.sub("", (HERE / page).read_text(encoding="utf-8")).strip()


def summary(text: str) -> tuple[str, str]:
    """The title of a page and its first sentence."""
    title = re.search(r"^# (.+)$", text, flags=re.M)
    prose = re.sub(r"^[#|!<].*$", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    first = next((block for block in prose.split("\n\n") if block.strip()), "")
    sentence = re.split(r"(?<=[.!?:])\s", " ".join(first.split()), maxsplit=1)[0]
    return title.group(1) if title else "", sentence


def short(nav: Any, description: str) -> str:
    """The content of llms.txt (https://llmstxt.org)."""
    lines = ["# hooked_lm", "", f"> {description}", "", "## Pages", ""]
    for page in pages(nav):
        title, about = summary(text_of(page))
        lines.append(f"- [{title}]({page.removesuffix('.md')}.html): {about}")
    return "\n".join([*lines, "", "All of their text is in [llms-full.txt](llms-full.txt).", ""])


def full(nav: Any) -> str:
    """The content of llms-full.txt: what agents need first, then every page."""
    agents = (HERE.parent / "AGENTS.md").read_text(encoding="utf-8").strip()
    return "\n\n---\n\n".join([agents, *(text_of(page) for page in pages(nav))]) + "\n"
