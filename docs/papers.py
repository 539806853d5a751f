"""Papers and pages that a text names become links: `arXiv:2211.00593`, `doi:10.1214/aos/1176344552`, `huggingface.co/blog/smollm3`."""

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

ARXIV, DOI = r"arXiv:\d{4}\.\d{4,5}", r"doi:10\.\d{4,}/[\w./()<>;:-]*\w"
PAGE = r"(?:https://)?[\w-]+(?:\.[\w-]+)*\.(?:ai|co|com|io|org|pub)/[\w./#-]*\w"


class Links(Extension):
    """The extension of Markdown that makes the links; what is code or a link already stays as it is."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Adds the links to the rules for text in a line."""
        md.inlinePatterns.register(_Link(rf"\b({ARXIV}|{DOI}|{PAGE})", md), "papers", priority=50)


class _Link(InlineProcessor):
    ANCESTOR_EXCLUDES = ("a",)

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        """A link with the text that is written."""
        link = Element("a", href=address(m.group(1)))
        link.text = m.group(1)
        return link, m.start(), m.end()


def address(name: str) -> str:
    """The address of a paper, such as "arXiv:2211.00593", or of a page.

    >>> address("doi:10.1214/aos/1176344552")
    'https://doi.org/10.1214/aos/1176344552'
    """
    name = name.replace("arXiv:", "arxiv.org/abs/").replace("doi:", "doi.org/")
    return name if name.startswith("https://") else f"https://{name}"
