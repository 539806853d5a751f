"""Papers and pages that a text names become links: `arXiv:2211.00593`, `doi:10.1214/aos/1176344552`, `host.org/path`.

So do the authors and the year of a paper, where nothing of the kind follows, if the paper is in a table.
"""

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

ARXIV, DOI = r"arXiv:\d{4}\.\d{4,5}", r"doi:10\.\d{4,}/[\w./()<>;:-]*\w"
PAGE = r"(?:https://)?[\w-]+(?:\.[\w-]+)*\.(?:ai|co|com|io|org|pub)/[\w./#-]*\w"

PAPERS = {
    "Ameisen et al. 2025": "transformer-circuits.pub/2025/attribution-graphs/methods.html",
    "Bricken et al. 2023": "transformer-circuits.pub/2023/monosemantic-features/index.html",
    "Chan et al. 2022": "www.alignmentforum.org/posts/JvZhhzycHu2Yd57RN/causal-scrubbing-a-method-for-rigorously-testing",
    "Efron 1979": "doi:10.1214/aos/1176344552",
    "Elhage et al. 2021": "transformer-circuits.pub/2021/framework/index.html",
    "Gurnee et al. 2026": "transformer-circuits.pub/2026/workspace/index.html",
    "Hall 1988": "doi:10.1214/aos/1176350933",
    "Hewitt and Liang 2019": "arXiv:1909.03368",
    "Jaccard 1912": "doi:10.1111/j.1469-8137.1912.tb05611.x",
    "Lindner et al. 2023": "arXiv:2301.05062",
    "Nanda 2023": "www.neelnanda.io/mechanistic-interpretability/attribution-patching",
    "Reimers and Gurevych 2019": "arXiv:1908.10084",
    "Wilson's (1927)": "doi:10.1080/01621459.1927.10502953",
}
AUTHORS = rf"(?:{'|'.join(map(re.escape, PAPERS))})".replace(r"\ ", r"\s+") + rf"(?!,\s+(?:{ARXIV}|{DOI}|{PAGE}))"


class Links(Extension):
    """The extension of Markdown that makes the links; what is code or a link already stays as it is."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Adds the links to the rules for text in a line."""
        md.inlinePatterns.register(_Link(rf"\b({ARXIV}|{DOI}|{PAGE}|{AUTHORS})", md), "papers", priority=50)


class _Link(InlineProcessor):
    ANCESTOR_EXCLUDES = ("a",)

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        """A link with the text that is written."""
        link = Element("a", href=address(m.group(1)))
        link.text = m.group(1)
        return link, m.start(), m.end()


def address(name: str) -> str:
    """The address of a paper, such as "arXiv:2211.00593" or "Efron 1979", or of a page."""
    words = " ".join(name.split())
    name = PAPERS.get(words, words).replace("arXiv:", "arxiv.org/abs/").replace("doi:", "doi.org/")
    return name if name.startswith("https://") else f"https://{name}"
