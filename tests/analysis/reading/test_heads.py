"""What heads look at, against toy models whose heads are known, and against the patterns of a cache, number by number."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading import head_detector, heads
from hooked_lm.analysis.reading.head_detector import compute_head_attention_similarity_score, detect_head
from hooked_lm.analysis.reading.head_kinds import duplicate_token, induction, previous_token
from hooked_lm.analysis.reading.heads import (
    ChanceScores,
    attention_statistics,
    head_scores,
    repeated_random_tokens,
    rows_of,
)
from hooked_lm.hooks import columns
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.results import Scores
from tests.close import assert_close
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt
from tests.unchecked import unchecked

V, N = 12, 11  # tokens and positions of the toy
ROW = torch.tensor([11, 3, 1, 4, 5, 9, 3, 1, 4, 5, 9])  # a first token, and five that are repeated
SEVERAL = ("gpt2", "llama", "gemma2", "gptj", "gpt_oss", "gpt_neo", "bamba")
HYBRID = "bamba"
REPEATED = "When Mary and John left, Mary and John left"


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def first_case(family: str) -> Case:
    return next(case for case in DECODER_CASES if case.family == family)


def small(**changes: Any) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "n_ctx": 64, "d_vocab": 100}
    return HookedTransformer(
        HookedTransformerConfig(**{**sizes, "act_fn": "gelu", "device": "cpu", "seed": 0, **changes})
    )


@pytest.fixture(scope="module")
def toy() -> HookedTransformer:
    """Three heads a layer. Layer 0: a previous-token head that also tells which token it was, a duplicate-token head, a uniform
    one. Layer 1: an induction head on what the first tells, two uniform ones."""
    sizes = {"n_layers": 2, "d_model": 2 * V + N, "n_heads": 3, "d_head": V + N, "n_ctx": N, "d_vocab": V}
    model = small(**sizes, attn_only=True, normalization_type=None)
    token, position, before = slice(0, V), slice(V, V + N), slice(V + N, 2 * V + N)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.embed.W_E[:, token] = torch.eye(V)
        model.pos_embed.W_pos[:, position] = torch.eye(N)
        first, second = model.blocks[0].attn, model.blocks[1].attn
        first.W_Q[0, position, :N] = 1000 * torch.eye(N)
        first.W_K[0, position, :N] = torch.eye(N).roll(1, 1)
        first.W_V[0, token, :V] = torch.eye(V)
        first.W_O[0, :V, before] = torch.eye(V)
        first.W_Q[1] = torch.cat([1000 * torch.eye(V + N), torch.zeros(V, V + N)])
        first.W_K[1] = torch.cat([torch.eye(V + N), torch.zeros(V, V + N)])
        first.W_K[1, position, V:] *= -2  # its own token is the same, too, but not what it looks for
        second.W_Q[0, token, :V] = 1000 * torch.eye(V)
        second.W_K[0, before, :V] = torch.eye(V)
    return model


# ---- kinds of heads ------------------------------------------------------------------------------------------------


def test_heads_that_are_known_score_one_and_uniform_ones_what_chance_gives(toy: HookedTransformer) -> None:
    scores = head_scores(toy, ROW)
    expected = {("previous_token", 0, 0), ("duplicate_token", 0, 1), ("induction", 1, 0)}
    found = {
        (kind, layer, head)
        for kind in scores.axes["kind"]
        for layer in range(2)
        for head in range(3)
        if float(scores.select(kind=kind, layer=layer, head=head).mean) > 0.9
    }
    assert found == expected
    for place in expected:
        assert_close(float(scores.select(kind=place[0], layer=place[1], head=place[2]).mean), 1)
    uniform = scores.above_chance().select(layer=1, head=[1, 2]).mean
    assert_close(uniform, 0.0, scale=1.0)
    others = [s for s in expected if s[1:] != (0, 1)]
    for kind, layer, head in others:  # such a head is not of another kind
        rest = scores.select(layer=layer, head=head).mean[[k != kind for k in scores.axes["kind"]]]
        assert rest.max() < 0.25


def test_targets_by_hand() -> None:
    assert previous_token(ROW).nonzero().tolist() == [[i, i - 1] for i in range(1, N)]
    assert duplicate_token(ROW).nonzero().tolist() == [[i, i - 5] for i in range(6, N)]
    assert induction(ROW).nonzero().tolist() == [[i, i - 4] for i in range(6, N)]
    triple = torch.tensor([5, 5, 5])  # what follows the first is the token itself
    assert induction(triple).nonzero().tolist() == [[1, 1], [2, 1], [2, 2]]


def by_hand(model: Any, row: Tensor, targets: Tensor) -> Tensor:
    """The score of each layer and head on one prompt, query by query."""
    _, cache = model.run_with_cache(row[None], attention_mask=torch.ones_like(row[None]))
    found = torch.full((model.cfg.n_layers, model.cfg.n_heads), torch.nan)
    queries = [q for q in range(len(row)) if targets[q].any()]
    for layer in range(model.cfg.n_layers):
        if f"blocks.{layer}.attn.hook_pattern" not in cache:
            continue
        pattern = cache["pattern", layer][0]
        for head in range(pattern.shape[0]):
            shares = [sum(float(pattern[head, q, k]) for k in targets[q].nonzero()) for q in queries]
            found[layer, head] = sum(shares) / len(shares)
    return found


@torch.no_grad()
def test_induction_on_random_tokens_is_the_mean_over_queries(demo: HookedTransformer) -> None:
    tokens = repeated_random_tokens(demo, n_prompts=2, length=8, seed=3)
    scores = head_scores(demo, n_prompts=2, length=8, seed=3).select(kind="induction")
    assert (tokens[:, 0] == demo.tokenizer.bos_token_id).all()
    for i, row in enumerate(tokens):
        targets = torch.zeros(17, 17, dtype=torch.bool)
        for place in range(1, 9):
            targets[place + 8, place + 1] = True
        assert_close(scores.values[..., i], by_hand(demo, row, targets))
    assert scores.mean[1, 0] > 0.7 > scores.mean[1, 1]


@pytest.mark.parametrize("family", SEVERAL)
@torch.no_grad()
def test_scores_and_statistics_of_families_against_their_patterns(family: str) -> None:
    case = first_case(family)
    model, tokens = hooked(case), prompt(case, batch=2)
    tokens = tokens.clamp(min=3)  # neither special tokens nor padding
    tokens[:, -4:] = tokens[:, 2:6]
    scores, statistics = head_scores(model, tokens), attention_statistics(model, tokens)
    has_attention = [f"blocks.{i}.attn.hook_pattern" in model.hook_dict for i in range(model.cfg.n_layers)]
    assert (scores.mean.isnan().any(2).any(0) == ~torch.tensor(has_attention)).all()
    assert all(has_attention) == (family != HYBRID)
    _, cache = model.run_with_cache(tokens)
    for i, row in enumerate(tokens):
        for kind in (previous_token, duplicate_token, induction):
            found = scores.select(kind=kind.__name__).values[..., i]
            expected = by_hand(model, row, kind(row))
            assert_close(found, expected)
        for layer in (layer for layer, has in enumerate(has_attention) if has):
            pattern = cache["pattern", layer][i, :, 1:]
            part = statistics.select(layer=layer).values[..., i]
            left = pattern / pattern.sum(-1, keepdim=True)
            away = torch.arange(1, len(row))[:, None] - torch.arange(len(row))
            entropy = -(left * left.clamp(min=1e-30).log()).sum(-1).mean(-1)
            expected = torch.stack([entropy, (left * away).sum(-1).mean(-1), pattern[..., 0].mean(-1)])
            assert_close(part, expected)


def test_uniform_attention_within_a_window_scores_what_chance_gives() -> None:
    model = small(use_local_attn=True, window_size=3, attn_types=["global", "local"], attn_only=True)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.zero_()
    scores = head_scores(model, n_prompts=2, length=5)
    assert_close(scores.above_chance().values, 0.0, scale=1.0)
    previous = scores.select(kind="previous_token", head=0).mean
    assert_close(previous[1], (1 / 2 + 8 / 3) / 9)  # a window of three
    assert_close(previous[0], sum(1 / n for n in range(2, 11)) / 9)
    assert (scores.select(kind="induction", layer=1).values == 0).all()  # too far back to be seen


def test_statistics_of_uniform_and_of_pointed_attention(toy: HookedTransformer) -> None:
    found = attention_statistics(toy, ROW)
    queries = range(1, N)
    uniform = found.select(layer=1, head=2).mean
    expected = [
        sum(math.log(q + 1) for q in queries),
        sum(q / 2 for q in queries),
        sum(1 / (q + 1) for q in queries),
    ]
    assert_close(uniform, torch.tensor(expected) / len(queries))
    assert_close(found.select(layer=0, head=0).mean, torch.tensor([0.0, 1.0, 0.1]))
    assert list(found.to_dataframe().columns) == ["statistic", "layer", "head", "mean"]  # of one text


# ---- no fake effects -----------------------------------------------------------------------------------------------


def share_of_significant_cells(scores: Scores, level: float) -> float:
    low, high = scores.interval(level)
    return float(((low > 0) | (high < 0)).float().mean())


@pytest.mark.slow
def test_untrained_models_are_at_chance(demo: HookedTransformer) -> None:
    """With a new model for each prompt; the weights of one differ from uniform attention by little, but always by the same."""
    options = {"n_prompts": 1, "length": 20, "control": None}
    found = [head_scores(small(seed=i, n_heads=8, d_head=4), seed=i, **options) for i in range(60)]
    values = torch.cat([scores.above_chance().values for scores in found], -1)
    assert share_of_significant_cells(Scores(values, found[0].axes), 0.99) <= 0.05
    one = head_scores(small(), length=20).above_chance().mean
    trained = head_scores(demo, n_prompts=4, length=20).above_chance().mean
    assert one.abs().max() < 0.02 < 0.6 < trained.max()


def test_prompts_whose_targets_belong_to_another_prompt_are_at_chance(demo: HookedTransformer) -> None:
    other = repeated_random_tokens(demo, 1, 25, seed=1)[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.zeros(40, 1).long(), torch.randint(1, 1506, (40, 50), generator=generator)], 1)
    kinds = {"duplicate_token": lambda row: duplicate_token(other), "induction": lambda row: induction(other)}
    fake = head_scores(demo, tokens, kinds={"previous_token": previous_token, **kinds}, chance="shuffled")
    assert share_of_significant_cells(fake.above_chance(), 0.95) <= 0.05
    true = head_scores(demo, other[None].expand(4, -1), kinds=["induction"], chance="shuffled").above_chance()
    assert true.mean[0, 1, 0] > 0.6  # the same measure, where there is something to find


# ---- prompts and memory --------------------------------------------------------------------------------------------


def test_padding_is_left_out_and_lengths_may_differ(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [REPEATED, "Mary gave Mary a drink and Mary left"]
    alone = [head_scores(demo, text) for text in texts]
    together = head_scores(demo, texts)
    for i, scores in enumerate(alone):
        assert_close(together.values[..., i], scores.values[..., 0])
        assert torch.equal(together.chance[..., i], scores.chance[..., 0])
    for side in ("right", "left"):
        monkeypatch.setattr(demo.cfg, "default_padding_side", side)
        padded = demo.to_tokens(texts)
        assert int(padded[1, {"right": -1, "left": 0}[side]]) == 0 != int(padded[0, -1])
        assert [row.tolist() for row in rows_of(demo, padded)] == [demo.to_tokens(text)[0].tolist() for text in texts]
        assert_close(head_scores(demo, padded).values, together.values)


def test_small_batches_give_the_same(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = head_scores(demo, n_prompts=5, length=6)
    monkeypatch.setattr(heads, "NUMBERS", 1)
    assert_close(head_scores(demo, n_prompts=5, length=6).values, expected.values)


def test_blocks_of_rows_give_the_same(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [REPEATED, "Mary gave Mary a drink and Mary left"]

    def own_kind(row: Tensor) -> Tensor:
        return torch.ones(len(row), len(row), dtype=torch.bool).tril(-2)

    def found() -> list[Tensor]:
        scores = head_scores(demo, texts, kinds={"induction": induction, "own": own_kind}, chance="shuffled")
        by_chance = head_scores(demo, texts)
        detected = [detect_head(demo, texts, "induction_head", error_measure=measure) for measure in ("mul", "abs")]
        detected.append(detect_head(demo, REPEATED, own_kind(demo.to_tokens(REPEATED)[0]).float(), exclude_bos=True))
        detected.append(detect_head(demo, texts, "duplicate_token_head", exclude_current_token=True))
        statistics = attention_statistics(demo, texts).values
        return [scores.values, scores.chance, by_chance.values, by_chance.chance, statistics, *detected]

    expected = found()
    n_calls = []
    monkeypatch.setattr(columns, "MOST_NUMBERS", 8 * 10 * 4)
    monkeypatch.setattr(heads._Look, "__call__", counted(heads._Look.__call__, n_calls))
    for own, whole in zip(found(), expected, strict=True):
        assert_close(own, whole)
    assert len(n_calls) > 2 * 4 * 2 * 6  # blocks, layers, prompts, runs


def counted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    return call


def test_memory_does_not_grow_with_the_square_of_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model, n = small(n_ctx=400, d_head=4, d_model=16, n_layers=1), 400
    tokens = torch.randint(100, (1, n // 2)).repeat(1, 2)
    monkeypatch.setattr(columns, "MOST_NUMBERS", 40 * n)  # ten rows of the pattern
    with Sizes() as sizes:
        head_scores(model, tokens)
        attention_statistics(model, tokens)
        detect_head(model, tokens, "induction_head")
    assert sizes.largest <= 150 * n  # targets of three kinds, in blocks of 40 rows


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that was made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_patterns_of_one_layer_at_a_time_are_in_memory(demo: HookedTransformer) -> None:
    tokens = repeated_random_tokens(demo, n_prompts=6, length=50)
    seen: list[weakref.ref[Tensor]] = []

    class Watch:
        records = True

        def __call__(self, pattern: Tensor, hook: Any) -> None:
            assert all(earlier() is None for earlier in seen), f"patterns before {hook.name} are still there"
            seen.append(weakref.ref(pattern))

    with demo.hooks(fwd_hooks=[("blocks.*.attn.hook_pattern", Watch())]), Sizes() as sizes:
        head_scores(demo, tokens)
        attention_statistics(demo, tokens)
    assert len(seen) == 8
    assert sizes.largest <= max(6 * 8 * 101**2, max(weight.numel() for weight in demo.parameters()))


def test_generated_prompts(demo: HookedTransformer) -> None:
    tokens = repeated_random_tokens(demo, n_prompts=3, length=9, seed=5)
    once = tokens[:, 1:10]
    assert torch.equal(once, tokens[:, 10:])
    assert all(len(set(row.tolist())) == 9 for row in once)
    assert not (once == 0).any()
    assert torch.equal(tokens, repeated_random_tokens(demo, n_prompts=3, length=9, seed=5))
    assert not torch.equal(tokens, repeated_random_tokens(demo, n_prompts=3, length=9, seed=6))
    assert repeated_random_tokens(small(), 2, 4).shape == (2, 8)  # no tokenizer, so no BOS


def test_files_and_parts(demo: HookedTransformer, tmp_path: Any) -> None:
    scores = head_scores(demo, n_prompts=2, length=5, seed=1)
    scores.save(tmp_path / "scores.safetensors")
    again = ChanceScores.load(tmp_path / "scores.safetensors")
    assert torch.equal(again.values, scores.values)
    assert torch.equal(again.chance, scores.chance)
    assert again.about["seed"] == 1
    assert scores.select(layer=1).chance.shape == scores.select(layer=1).values.shape
    assert scores.select(kind="induction").plot().data


def test_the_model_is_as_before(demo: HookedTransformer) -> None:
    state = torch.random.get_rng_state()
    before = [(weight.requires_grad, weight.clone()) for weight in demo.parameters()]
    head_scores(demo, n_prompts=2, length=5, chance="shuffled")
    with pytest.raises(ValueError, match="no token at which"):
        head_scores(demo, "Mary left")
    assert all(
        asks == w.requires_grad and torch.equal(v, w) for (asks, v), w in zip(before, demo.parameters(), strict=True)
    )
    assert not any(point.is_listening for point in demo.hook_points())
    assert torch.equal(state, torch.random.get_rng_state())


def test_bad_input(demo: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="no kind of head 'name mover'; the kinds are previous_token"):
        head_scores(demo, kinds=["name mover"])
    with pytest.raises(ValueError, match="kinds is empty"):
        head_scores(demo, kinds=[])
    with pytest.raises(ValueError, match="'uniform' or 'shuffled', got 'zero'"):
        head_scores(demo, chance="zero")
    with pytest.raises(ValueError, match="prompt 1 has no token at which a head of the kind 'duplicate_token'"):
        head_scores(demo, [REPEATED, "Mary left"])
    with pytest.raises(ValueError, match="lower triangle"):
        head_scores(demo, REPEATED, kinds={"later": lambda row: induction(row).T})
    with pytest.raises(ValueError, match="length=64 repeated makes 129 tokens, and the model takes 128"):
        head_scores(demo, length=64)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        head_scores(demo, n_prompts=0)
    with pytest.raises(ValueError, match="99 tokens that are not special"):
        repeated_random_tokens(small(n_ctx=400, d_vocab=99), length=100)
    with pytest.raises(ValueError, match="prompt 0 has 1 tokens; expected 2 to 128"):
        attention_statistics(demo, torch.tensor([5]))
    with pytest.raises(ValueError, match="prompts is empty"):
        attention_statistics(demo, [])
    with unchecked(), pytest.raises(ValueError, match="ids"):
        attention_statistics(demo, torch.rand(2, 3))
    with pytest.raises(TypeError, match="got a Linear"):
        heads.check_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no attention"):
        head_scores(hooked(first_case("mamba")))


# ---- detect_head ---------------------------------------------------------------------------------------------------


def test_detect_head_finds_the_heads_of_the_toy(toy: HookedTransformer) -> None:
    previous = detect_head(toy, ROW, "previous_token_head")
    assert previous.shape == (2, 3)
    assert int(previous.argmax()) == 0
    assert_close(previous[0, 0], 10 / 11)  # the first query sees only itself
    assert_close(detect_head(toy, ROW, "previous_token_head", exclude_current_token=True)[0, 0], 1)
    repeats = torch.cat([ROW[:1], ROW[1:6], ROW[6:]])
    assert int(detect_head(toy, repeats, "duplicate_token_head").argmax()) == 1
    assert int(detect_head(toy, repeats, "induction_head").argmax()) == 3
    own = previous_token(ROW).float()
    own[0, 0] = 1  # exactly what the head does
    assert_close(detect_head(toy, ROW, own, error_measure="abs")[0, 0], 1)
    assert_close(detect_head(toy, ROW, own)[0, 0], 1)


@pytest.mark.every_parameter
@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("current", [False, True])
def test_detect_head_against_the_patterns(demo: HookedTransformer, measure: str, bos: bool, current: bool) -> None:
    """With all options, for a list of heads and of prompts: none of them may be dropped."""
    texts = [REPEATED, "Mary gave a drink to John and Mary gave"]
    which = [(0, 2), (1, 7), (0, 6)]
    options = {"exclude_bos": bos, "exclude_current_token": current, "error_measure": measure}
    found = detect_head(demo, texts, "induction_head", which, **options)
    for layer, head in which:
        scores = []
        for text in texts:
            _, cache = demo.run_with_cache(text, remove_batch_dim=True)
            pattern, row = cache["pattern", layer][head], demo.to_tokens(text)[0].tolist()
            total, hit, difference = 0.0, 0.0, 0.0
            for q in range(len(row)):
                for k in range(q + 1):
                    if (bos and k == 0) or (current and k == q):
                        continue
                    target = float(k > 0 and k - 1 < q and row[k - 1] == row[q])
                    total, hit = total + float(pattern[q, k]), hit + float(pattern[q, k]) * target
                    difference += abs(float(pattern[q, k]) - target)
            scores.append(hit / total if measure == "mul" else 1 - difference / len(row))
        assert_close(found[layer, head], sum(scores) / 2)
    asked = torch.zeros(4, 8, dtype=torch.bool)
    asked[0, 2] = asked[0, 6] = asked[1, 7] = True
    assert (found[~asked] == -1).all()
    by_layer = detect_head(demo, texts, "induction_head", {0: [6, 2], 1: [-1]}, **options)
    assert torch.equal(by_layer, found)


def test_detect_head_from_a_cache(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = detect_head(demo, REPEATED, "duplicate_token_head")
    _, cache = demo.run_with_cache(REPEATED)
    _, without_batch = demo.run_with_cache(REPEATED, remove_batch_dim=True)
    monkeypatch.setattr(head_detector, "see_patterns", lambda *args: pytest.fail("it ran the model"))
    for given in (cache, without_batch):
        assert_close(detect_head(demo, REPEATED, "duplicate_token_head", cache=given), expected)
    with pytest.raises(ValueError, match=r"the cache is of 1 prompts of \d+ tokens"):
        detect_head(demo, [REPEATED, REPEATED], "induction_head", cache=cache)


def test_detect_head_of_a_hybrid_is_nan_where_there_is_no_attention() -> None:
    model = hooked(first_case(HYBRID))
    attention = [
        layer for layer in range(model.cfg.n_layers) if f"blocks.{layer}.attn.hook_pattern" in model.all_points()
    ]
    found = detect_head(model, torch.tensor([5, 6, 7, 5]), "induction_head", {attention[0]: [0]})
    assert (~found.isnan()).any(1).nonzero().flatten().tolist() == attention
    assert (found[attention, 1:] == -1).all()
    assert 0 <= found[attention[0], 0] <= 1
    nowhere = next(layer for layer in range(model.cfg.n_layers) if layer not in attention)
    with pytest.raises(IndexError, match=f"no head 0 in layer {nowhere}"):
        detect_head(model, torch.tensor([5, 6, 7, 5]), "induction_head", [(nowhere, 0)])


def test_detect_head_refuses(demo: HookedTransformer) -> None:
    triangle = torch.ones(3, 3)
    with pytest.raises(ValueError, match="lower triangle"):
        detect_head(demo, "Mary left", triangle)
    with pytest.raises(ValueError, match=r"detection_pattern is \(4, 4\); expected \(3, 3\)"):
        detect_head(demo, "Mary left", torch.zeros(4, 4))
    with pytest.raises(ValueError, match="one of previous_token_head, duplicate_token_head, induction_head, got 'x'"):
        detect_head(demo, "Mary left", "x")
    with pytest.raises(ValueError, match="prompt 0 has 1 tokens"):
        detect_head(demo, "", "induction_head")
    with pytest.raises(ValueError, match="prompt 0 has 2"):
        detect_head(demo, "Mary " * 200, "induction_head")
    with pytest.raises(ValueError, match="error_measure must be one of mul, abs, got 'sub'"):
        detect_head(demo, "Mary left", "induction_head", error_measure="sub")
    with pytest.raises(IndexError, match="no head 8 in layer 0"):
        detect_head(demo, "Mary left", "induction_head", [(0, 8)])
    with pytest.raises(ValueError, match="that of one prompt"):
        head_detector.get_induction_head_detection_pattern(torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match="error_measure"):
        compute_head_attention_similarity_score(
            triangle, triangle.tril(), exclude_bos=False, exclude_current_token=False, error_measure="x"
        )


def test_nothing_left_of_the_attention_is_no_match() -> None:
    on_first = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    options = {"exclude_current_token": False, "error_measure": "mul"}
    assert compute_head_attention_similarity_score(on_first, on_first, exclude_bos=False, **options) == 1.0
    assert compute_head_attention_similarity_score(on_first, on_first, exclude_bos=True, **options) == 0.0
