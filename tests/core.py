"""What the fast suite runs of a matrix of tests: rows that stand for the others, which are marked slow.

`make test` shows that an installation works and that the core is right; `make test-all` proves every row.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# One family for each mechanism: learned positions, rotary ones with grouped heads, windows and soft caps, parallel sublayers,
# experts, compressed keys, a state space, and the other two kinds of model.
CORE = ("gpt2", "llama", "gemma2", "gptj", "mixtral", "deepseek_v3", "mamba2", "bert", "t5")
IMAGES = ("vit", "clip", "llava", "qwen2_5_vl")  # a tower, a pair, one size of images, and all sizes
CORE_KINDS = ("standard", "rotary", "windowed", "parallel", "hybrid")  # of toys


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Of a test of one family that has a parameter for its name: one worker has all its tests; most families are slow."""
    return [pytest.mark.xdist_group(name), *([] if name in CORE else [pytest.mark.slow])]


def thinned(rows: Iterable[Any], keep: Collection[Any] = CORE) -> list[Any]:
    """Parameters of a test, of which all but those to keep are slow."""
    rows = list(rows)
    assert any(row in keep for row in rows), "nothing would be left"
    values = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [
        row if row in keep else pytest.param(*of, marks=pytest.mark.slow) for row, of in zip(rows, values, strict=True)
    ]
