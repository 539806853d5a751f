"""Head labels: "L1H7" is head 7 of layer 1."""

import operator
import re
from typing import SupportsIndex

LABEL = re.compile(r"L(\d+)H(\d+)")


def head_label(layer: int, head: int) -> str:
    """The label of a head.

    >>> head_label(1, 7)
    'L1H7'
    """
    return f"L{layer}H{head}"


def parse_head_label(label: str) -> tuple[int, int]:
    """The layer and the head of a label.

    Raises ValueError for any other string.

    >>> parse_head_label("L1H7")
    (1, 7)
    """
    if (found := LABEL.fullmatch(label)) is None:
        raise ValueError(f"{label!r} is not the label of a head; labels are like 'L1H7', head 7 of layer 1")
    return int(found[1]), int(found[2])


def head_in_layer(head: SupportsIndex | str, layer: int | None) -> int:
    """The index of a head that is given as an index or as a label; `layer` is None where labels cannot be used.

    Raises ValueError for the label of a head in another layer, TypeError for anything else.

    >>> head_in_layer("L1H7", layer=1), head_in_layer(-1, layer=1)
    (7, -1)
    """
    if isinstance(head, str):
        found = parse_head_label(head)
        if found[0] != layer:
            raise ValueError(f"head {head!r} is in layer {found[0]}, and layer {layer} was chosen")
        return found[1]
    if isinstance(head, bool) or not isinstance(head, SupportsIndex):
        raise TypeError(f"a head is an index, or a label such as 'L1H7'; got {head!r}")
    return operator.index(head)


def head_at_site(head: SupportsIndex | str, site: str) -> int:
    """The index of a head at a site such as "blocks.1.attn.hook_z"; see `head_in_layer`.

    >>> head_at_site("L1H7", "blocks.1.attn.hook_z")
    7
    """
    found = re.search(r"blocks\.(\d+)\.", site)
    return head_in_layer(head, None if found is None else int(found[1]))
