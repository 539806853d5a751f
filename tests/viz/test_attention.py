"""What attention views refuse, and what of large ones is kept."""

import base64
import gzip
import math
import re

import numpy as np
import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.viz import attention
from hooked_lm.viz.attention_data import Packed, pack
from tests.close import assert_close, assert_near

ROUNDED = "values are rounded to steps"
TOKENS = ["a", "b", "c"]


def restored(packed: Packed, n_heads: int, n: int) -> torch.Tensor:
    codes = np.frombuffer(gzip.decompress(base64.b64decode(packed.data)), "<u2" if packed.bits == 16 else "u1")
    roots = torch.tensor(packed.low + codes.astype(np.float64) * packed.step)
    values = roots * roots.abs()
    values[torch.tensor(codes == 2**packed.bits - 1)] = torch.nan
    if not packed.causal:
        return values.view(n_heads, n, n)
    whole = torch.zeros(n_heads, n, n, dtype=torch.float64)
    below = torch.ones(n, n).tril().bool()
    whole[:, below] = values.view(n_heads, -1)
    return whole


@pytest.mark.parametrize(
    ("pattern", "how", "message"),
    [
        (torch.zeros(2, 2, 3, 3), {}, "a batch of 2 prompts, and a picture shows one: take the first with pattern[0]"),
        (torch.zeros(3, 3), {}, "not [head, query_pos, key_pos]"),
        (torch.zeros(0, 3, 3), {}, "empty"),
        ([], {}, "no layer"),
        ([torch.zeros(1, 3, 3), torch.zeros(1, 3, 4)], {}, "same queries and keys"),
        (torch.zeros(2, 3, 3), {"heads": 2}, "no head 2: there are H0 to H1"),
        ([torch.zeros(2, 3, 3)] * 2, {"heads": ["L1H1", "L2H0"]}, "no head L2H0: there are L0H0 to L1H1"),
        (torch.zeros(2, 3, 3), {"heads": [0, "H0"]}, "given twice"),
        (torch.zeros(2, 3, 3), {"heads": []}, "heads is empty"),
        (torch.zeros(2, 3, 4), {}, "give key_tokens"),
        (torch.zeros(2, 3, 4), {"key_tokens": ["a"]}, "1 key_tokens for 4 keys"),
        (torch.zeros(2, 2, 2), {}, "3 tokens for 2 queries"),
        (torch.rand(2, 3, 3), {"max_bytes": 10}, "do not fit into 10 bytes"),
        (torch.zeros(1, 1, 1).expand(1, 20_000, 20_000), {}, "too many for a page"),
    ],
)
def test_what_is_refused(pattern, how, message) -> None:
    tokens = TOKENS if message != "too many for a page" else ["a"] * 20_000
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(pattern, tokens, **how)


@pytest.mark.parametrize("causal", [True, False])
def test_small_patterns_come_back(causal: bool) -> None:
    scores = torch.randn(4, 6, 6)
    pattern = (scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf) if causal else scores).softmax(-1)
    packed = pack(list(pattern), 10_000)
    assert (packed.causal, packed.kept) == (causal, None)
    assert_near(restored(packed, 4, 6), pattern.double(), 1e-4, ROUNDED)


def test_masked_scores_have_their_range() -> None:
    scores = torch.tensor([[-3.0, -torch.inf], [torch.nan, 2.0]])
    packed = pack([scores], 10_000)
    assert packed.causal
    assert_close(packed.low, -math.sqrt(3))
    found = restored(packed, 1, 2)
    assert found[0, 1, 0].isnan()
    assert_near(found[0, [0, 1], [0, 1]], torch.tensor([-3.0, 2.0]).double(), 1e-4, ROUNDED)


def test_of_too_many_values_the_largest_of_each_query_are_kept() -> None:
    pattern = torch.randn(8, 300, 300).softmax(-1)
    packed = pack(list(pattern), 40_000)
    assert packed.bits == 8
    assert packed.kept is not None
    assert len(packed.data) <= 40_000
    size = pattern.sort(descending=True).values
    assert_near(
        torch.tensor(packed.coverage), size[..., : packed.kept].sum() / pattern.sum(), 1e-5, "sums in another order"
    )
    found = restored(packed, 8, 300)
    assert int((found > 0).sum(-1).max()) <= packed.kept
    top = pattern.argmax(-1, keepdim=True)
    assert_near(found.gather(-1, top), pattern.gather(-1, top).double(), 0.02, ROUNDED)


def test_a_cache_shows_its_attention():
    model = HookedTransformer.from_pretrained("demo")
    prompt = "When Mary and John went"
    _, cache = model.run_with_cache(prompt)
    tokens, patterns = model.to_str_tokens(prompt), {layer: cache["pattern", layer][0] for layer in range(4)}
    assert cache.attention(prompt).body == attention(patterns, tokens).body
    last = attention({3: patterns[3]}, tokens, heads="L3H1").body
    assert cache.attention(prompt, layers=-1, heads="L3H1").body == last
    assert cache.remove_batch_dim().attention(model.to_tokens(prompt), [3], "L3H1").body == last
    with pytest.raises(ValueError, match="the prompt has 2 tokens, and the run had 6: give the token ids"):
        cache.attention("When")
    with pytest.raises(IndexError, match="there is no layer 4: the model has 4"):
        cache.attention(prompt, layers=4)
    _, without = model.run_with_cache(prompt, names_filter="blocks.*.hook_resid_post")
    with pytest.raises(KeyError, match=r"hook_pattern.*keeps it"):
        without.attention(prompt)
