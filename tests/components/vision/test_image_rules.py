"""Masks of runs whose images, or whole prompts, are read in both directions: against a mask written down position by position."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.vision.image_context import ImageContext, ImageFeatures
from hooked_lm.components.vision.image_rules import BidirectionalImages, BidirectionalPrefix

DEVICE = torch.device("cpu")
ROWS = ("..ab", "aaabb", ".aa.bbb.", "aa", "....", "a.b")  # words, and the tokens of two images


def is_image(rows: list[str]) -> Tensor:
    """Which tokens stand for images; `_` is padding, and `:` a word after the prompt."""
    return torch.tensor([[token not in "._:" for token in row] for row in rows])


def made(rule: BidirectionalImages | BidirectionalPrefix, rows: list[str], n_past: int = 0) -> ImageContext:
    """The context of a run over rows whose first tokens are cached."""
    real = torch.tensor([[token != "_" for token in row] for row in rows])
    cache = None
    if n_past:
        cache = KeyValueCache(1)
        cache[0].append(torch.zeros(len(rows), n_past, 1, 1), torch.zeros(len(rows), n_past, 1, 1))
    new = [row[n_past:] for row in rows]
    context = ImageContext(len(new[0]), DEVICE, None if bool(real.all()) else real, cache)
    if any(":" in row for row in new):
        context.suffix = torch.tensor([[token == ":" for token in row] for row in new])
    images, some = is_image(new), ImageFeatures(torch.zeros(1, 1, 4), torch.zeros(1, 1, 2, dtype=torch.long))
    features = some if bool(images.any()) else None
    rule.apply(context, images, features)
    return context


def expected(rows: list[str], seen: Callable[[str, int, int], bool], window: int | None, n_past: int = 0) -> Tensor:
    """Which keys each query may attend to, in words: up to itself, within the window, or `seen`; never padding but itself."""

    def may(row: str, query: int, key: int) -> bool:
        if row[key] == "_":
            return key == query
        causal = key <= query and (window is None or query - key < window)
        return causal or seen(row, query, key) or key == query

    positions = range(len(rows[0]))
    return torch.tensor([[[[may(row, q, k) for k in positions] for q in positions[n_past:]]] for row in rows])


def in_one_image(row: str, query: int, key: int) -> bool:
    """Whether a later key is in the contiguous image tokens of the query."""
    between = row[query : key + 1]
    return key > query and all(token in "ab" for token in between)


def assert_masks(context: ImageContext, found: Callable[[int | None], Tensor]) -> None:
    """The masks with and without a window, for the fused kernel and for the computation in steps."""
    for window in (None, 1, 2, 3, 50):
        wanted = found(window)
        mask = context.mask(True, window)
        given = torch.ones_like(wanted).tril(context.n_past) if mask is None else mask.expand_as(wanted)
        assert torch.equal(given, wanted), (window, given.int(), wanted.int())
        added = context.additive_mask(True, window, torch.float32).expand(wanted.shape)
        assert torch.equal(added == 0, wanted)


@pytest.mark.parametrize("row", ROWS)
def test_images_see_themselves(row: str):
    assert_masks(made(BidirectionalImages(), [row]), lambda window: expected([row], in_one_image, window))


def test_images_see_themselves_among_padding():
    rows = ["___.aaa.", "aa.bbb..", "......a."]
    assert_masks(made(BidirectionalImages(), rows), lambda window: expected(rows, in_one_image, window))


@pytest.mark.parametrize(("row", "n_past"), [(".aa..bbb.", 4), (".aa..", 3), (".aa.", 3), (".aabb.", 3)])
def test_images_after_a_cache_see_themselves(row: str, n_past: int):
    context = made(BidirectionalImages(), [row], n_past)
    assert_masks(context, lambda window: expected([row], in_one_image, window, n_past))
    assert (context.groups is None) == ("b" not in row)


def test_text_needs_no_mask():
    """The fused kernel then knows by itself what is causal."""
    assert made(BidirectionalImages(), ["....", "...."]).mask(True, None) is None
    assert made(BidirectionalImages(), [".a.", "a.."]).mask(True, None) is not None


@pytest.mark.parametrize("rows", [["....", "aab."], ["aab.::", "a..:::"], ["__a.", "aa.."], ["__a.:", ".a..:"]])
def test_prompts_see_themselves(rows: list[str]):
    def in_prompt(row: str, query: int, key: int) -> bool:
        return row[query] not in "_:" and row[key] not in "_:"

    context = made(BidirectionalPrefix(), rows)
    assert_masks(context, lambda window: expected(rows, in_prompt, window))
    padded = torch.tensor([[row.count("_")] for row in rows])
    last = len(rows[0]) - padded
    assert torch.equal(context.positions[:, -1:].expand(last.shape), last), "positions start at 1"


@pytest.mark.parametrize(("row", "n_past"), [("aa..bb.", 4), ("aa..bb:", 4), ("aa....", 4), ("aa...", 4)])
def test_prompts_after_a_cache_see_themselves_if_they_have_images(row: str, n_past: int):
    def in_prompt(row: str, query: int, key: int) -> bool:
        return "b" in row and min(query, key) >= n_past and ":" not in (row[query], row[key])

    assert_masks(made(BidirectionalPrefix(), [row], n_past), lambda window: expected([row], in_prompt, window, n_past))
