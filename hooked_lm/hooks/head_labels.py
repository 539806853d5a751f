"""Head labels: "L1H7" is head 7 of layer 1."""

import operator
import re
from collections.abc import Sequence
from typing import SupportsIndex

from hooked_lm.hooks.indices import Indices, Plain, plain_indices
from hooked_lm.hooks.select import Site, is_shorthand

Heads = str | Sequence[str] | Indices
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


def labelled_layer(given: Heads, hook_point: Site, layer: int | None) -> int | None:
    """The layer of a site: `layer`, or that of labels of heads if the site is a short name without a layer.

    >>> labelled_layer(["L1H7", "L1H2"], "z", layer=None)
    1
    """
    several = [given] if isinstance(given, str) else given if isinstance(given, (list, tuple)) else []
    labels = [one for one in several if isinstance(one, str)]
    has_none = isinstance(hook_point, str) and hook_point.isidentifier() and not hook_point[-1].isdigit()
    if layer is not None or not labels or not has_none:
        return layer
    layers = sorted({parse_head_label(label)[0] for label in labels})
    if len(layers) > 1:
        raise ValueError(f"heads={given!r} are of layers {layers}: one hook acts on one layer, so give one for each")
    return layers[0]


def head_indices(given: Heads, hook_point: Site, layer: int | None) -> Plain:
    """Heads as plain indices. Labels such as "L1H7" are accepted where the site belongs to one layer, which is checked.

    >>> (
    ...     head_indices(["L1H7", 0], "z", layer=1),
    ...     head_indices("L1H7", "blocks.1.attn.hook_z", layer=None),
    ... )
    ([7, 0], 7)
    """
    if isinstance(given, str):
        [head] = head_indices([given], hook_point, layer)  # type: ignore[misc]  # a list of one
        return head
    if not isinstance(given, (list, tuple)) or not any(isinstance(one, str) for one in given):
        return plain_indices("heads", given)
    if layer is None and isinstance(hook_point, str) and (found := re.search(r"blocks\.(\d+)\.", hook_point)):
        layer = int(found[1])
    elif layer is None and is_shorthand(hook_point):
        layer = hook_point[1]  # type: ignore[index, assignment]
    if layer is None:
        raise ValueError(
            f"heads={given!r}: a label needs a site in one layer, and {hook_point!r} has none; give indices"
        )
    return [head_in_layer(head, layer) for head in given]
