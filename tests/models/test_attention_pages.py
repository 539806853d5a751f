"""Pages of attention of long prompts, against the patterns of the explicit path."""

import json
import re
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.models import attention_pages, attention_rows
from hooked_lm.models.attention_pages import BlockMaxima
from hooked_lm.models.caches import activation_cache
from tests.close import assert_close

PROMPT = "When Mary and John went to the store, John gave a drink to Mary. Then Anna left, and Tom slept."


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are long from 9 tokens on, and an overview has 4 blocks at most."""
    for module in (attention_rows, activation_cache):
        monkeypatch.setattr(module, "MOST_ROWS", 8)
    monkeypatch.setattr(attention_pages, "MOST_BLOCKS", 4)


def said(view: Any) -> dict[str, Any]:
    found = re.search(r'class="meta">(.*?)</script>', view.body, re.S)
    assert found is not None
    page = json.loads(found[1])
    return {name: page[name] for name in ("queries", "keys", "heads", "notes", "causal", "bits")}


@pytest.mark.usefixtures("short")
def test_an_overview_has_the_largest_weight_of_each_block(
    model: HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooked_lm.hooks.columns.MOST_NUMBERS", 8 * 26 * 3)  # three rows at a time
    tokens = model.to_tokens(PROMPT)
    n = tokens.shape[1]
    assert n % 4  # the last block is shorter
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        maxima = BlockMaxima(n)
        model.run_with_hooks(tokens, fwd_hooks=[("*.hook_pattern", maxima)])
    size = -(-n // 4)
    for layer, found in maxima.of_layers.items():
        pattern = cache["pattern", layer][0]
        for i in range(4):
            for j in range(4):
                block = pattern[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
                assert_close(found[:, i, j], block.amax((1, 2)))
    views = said(model.attention(PROMPT)), said(cache.attention(PROMPT))
    for view in views:
        assert len(view["queries"]) == 4
        assert view["queries"][1].startswith(f"{size}:")
        assert f"the largest weight of {size} queries and {size} keys" in view["notes"][0]
    assert views[0] == views[1]


@pytest.mark.usefixtures("short")
def test_rows_that_are_chosen_are_exact_and_named(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(PROMPT)
    pages = (
        model.attention(PROMPT, query_positions=[-1, 3], layers=2),
        cache.attention(PROMPT, 2, query_positions=[-1, 3]),
    )
    n, words = model.to_tokens(PROMPT).shape[1], model.to_str_tokens(PROMPT)
    for page in map(said, pages):
        assert [query.split(" (")[-1] for query in page["queries"]] == [f"{n - 1})", "3)"]
        assert len(page["keys"]) == len(words)
        assert not page["notes"]
    assert said(pages[0]) == said(pages[1])


def test_short_prompts_are_shown_whole(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(PROMPT)
    assert said(model.attention(PROMPT, heads="L1H7")) == said(cache.attention(PROMPT, heads="L1H7"))
    assert len(said(model.attention(PROMPT))["queries"]) == model.to_tokens(PROMPT).shape[1]


def test_a_page_shows_one_prompt(model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="a page shows one prompt, and these are 2"):
        model.attention(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(IndexError, match="index 99 is out of range: the axis has length 3"):
        model.attention("Mary left", query_positions=99)
