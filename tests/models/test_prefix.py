"""A prefix is computed once: what follows it equals the run on the whole prompt, and what would not is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedTransformer, analysis, patching
from hooked_lm.components.kv_cache import ContinuedEntry
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions import AddDirection, InputTokens, Record, Scale
from hooked_lm.models.prefix import Prefix
from tests.close import GRADIENT, assert_apart, assert_close
from tests.core import thinned
from tests.families._vision import hooked_any
from tests.families.vision_languages import CASES as VISION_LANGUAGES
from tests.models.test_mixers import built
from tests.models.toys import BOTH_WAYS, ids, padded, toy, words

GREEDY: dict[str, Any] = {"verbose": False, "stop_at_eos": False, "do_sample": False}
SITE = "blocks.1.hook_resid_post"
N_PREFIX = 6
CONTINUATIONS = ["w7 w8", "w9"]


def rows_after(first: Tensor, *lengths: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Continuations of these lengths, padded on the left with their mask, and each with the prefix in front."""
    new = [ids(1, n, seed=n)[0] for n in lengths]
    return *padded(new, "left"), [torch.cat([first[0], row]) for row in new]


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotary", "standard", "windowed", "shortformer", "sinks", "alibi"])
def test_rows_of_different_lengths_follow_one_prefix(kind: str) -> None:
    model, first = toy(kind), ids(1, N_PREFIX)
    tokens, mask, whole = rows_after(first, 5, 2, 3)
    found, cache = model.run_with_cache(model.prefix(first).then(tokens, mask))
    assert found.shape[:2] == cache[SITE].shape[:2] == (3, 5)
    for i, row in enumerate(whole):
        logits, alone = model.run_with_cache(row[None])
        n = len(row) - N_PREFIX
        assert_close(found[i, -n:], logits[0, N_PREFIX:])
        assert_close(cache[SITE][i, -n:], alone[SITE][0, N_PREFIX:])
    assert torch.equal(cache.attention_mask, mask.bool())


def test_a_prefix_may_have_padded_rows_of_its_own() -> None:
    model = toy("rotary")
    tokens, mask = padded([ids(1, n, seed=n)[0] for n in (6, 4)], "right")
    prefix = model.prefix(tokens, attention_mask=mask)
    new = ids(2, 3, seed=9)
    for found, n, after, row in zip(model(prefix + new), (6, 4), new, tokens, strict=True):
        assert_close(found, model(torch.cat([row[:n], after])[None])[0, n:])
    assert_close(model(prefix + new[:1])[0], model(prefix + new)[0])  # one continuation of all rows


def test_text_after_a_prefix_has_no_bos() -> None:
    model = toy("standard", words())
    prompt = model.prefix("w4 w5 w6") + CONTINUATIONS
    assert prompt.tokens.tolist() == [[7, 8], [0, 9]]
    assert prompt.attention_mask.tolist() == [[1, 1], [0, 1]]
    assert_close(model(prompt)[0], model("w4 w5 w6 w7 w8")[0, -2:])
    assert_close(model(input=prompt, attention_mask=None), model(prompt))
    assert_close(model(prompt, return_type="both").loss, model(prompt, return_type="loss"))
    _, cache = model.run_with_cache(prompt, names_filter="z1", return_type=None)  # which stops after its layer
    assert_close(cache["z", 1], model.run_with_cache(prompt)[1]["z", 1])


def test_keys_and_values_are_shared_by_all_rows() -> None:
    prefix = toy("rotary").prefix(ids(1, N_PREFIX))
    prompt = prefix + ids(8, 3)
    for shared, entry in zip(prefix.keys_values.entries, prompt.opened()[1].entries, strict=True):
        assert isinstance(entry, ContinuedEntry)
        for ours, theirs in (
            (shared.past_keys, entry.shared.past_keys),
            (shared.past_values, entry.shared.past_values),
        ):
            assert ours is not None
            assert theirs is not None
            assert theirs.shape[0] == 8
            assert theirs.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()


def contents(prefix: Prefix) -> list[Tensor]:
    """Copies of all tensors of a prefix."""
    cache = prefix.keys_values
    keys = [x for entry in cache.entries for x in (entry.past_keys, entry.past_values)]
    states = [x for entry in cache.states.values() for x in (entry.window, entry.state)]
    return [x.clone() for x in (*keys, *states, prefix.tokens, prefix.logits) if x is not None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "hybrid"])
def test_a_hundred_generations_leave_it_as_it_is(kind: str) -> None:
    model = built(kind) if kind == "hybrid" else toy(kind)
    prefix = model.prefix(ids(1, N_PREFIX) % 20)
    before, first = contents(prefix), model.generate(prefix, 5, **GREEDY)
    for seed in range(50):
        model.generate(prefix.repeated(2), 3, seed=seed, verbose=False, stop_at_eos=False)
        model.generate(prefix + ids(1, 2, seed=seed) % 20, 3, **GREEDY)
    assert all(torch.equal(now, then) for now, then in zip(contents(prefix), before, strict=True))
    assert torch.equal(model.generate(prefix, 5, **GREEDY), first)
    assert len(prefix.keys_values.states) == (3 if kind == "hybrid" else 0)


def test_gradients_at_the_new_positions_are_those_of_the_whole_run() -> None:
    model, tokens = toy("rotary"), ids(2, 10)
    tokens[1, :N_PREFIX] = tokens[0, :N_PREFIX]
    prefix, found = model.prefix(tokens[:1, :N_PREFIX]), {}

    def gradient(prompt: Any, name: str) -> None:
        def keep(value: Tensor, hook: HookPoint) -> None:
            found[name] = value

        with model.hooks(bwd_hooks=[(SITE, keep)]):
            model(prompt)[:, -4:].square().sum().backward()

    gradient(tokens, "whole")
    gradient(prefix + tokens[:, N_PREFIX:], "after")
    assert_close(found["after"], found["whole"][:, N_PREFIX:], GRADIENT)
    assert not prefix.logits.requires_grad


# ---- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotary", "standard", "shortformer"])
def test_generation_after_a_prefix_is_that_of_the_whole_prompt(kind: str) -> None:
    model, first = toy(kind), ids(1, N_PREFIX)
    prefix = model.prefix(first)
    tokens, mask, whole = rows_after(first, 4, 1)
    found, cache = model.generate(prefix.then(tokens, mask), 3, return_cache=True, **GREEDY)
    for i, row in enumerate(whole):
        alone, of_alone = model.generate(row[None], 3, return_cache=True, **GREEDY)
        assert torch.equal(found[i, -len(row) - 3 :], alone[0])
        assert_close(cache[SITE][i, N_PREFIX - len(row) - 3 :], of_alone[SITE][0, N_PREFIX:])
    assert not found[1, :3].any()  # all padding is on the left
    assert torch.equal(model.generate(prefix, 3, **GREEDY), model.generate(first, 3, **GREEDY))


def test_samples_that_share_a_prefix() -> None:
    model = toy("rotary", words())
    prefix = model.prefix("w4 w5 w6")
    texts = model.generate(prefix.repeated(3), 4, seed=0, verbose=False, stop_at_eos=False)
    expected = model.generate(["w4 w5 w6"] * 3, 4, seed=0, verbose=False, stop_at_eos=False)
    assert texts == expected
    assert len(set(texts)) > 1
    assert model.generate(prefix + " w7", 2, **GREEDY) == model.generate("w4 w5 w6 w7", 2, **GREEDY)
    assert "".join(model.generate_stream(prefix + " w7", 2, **GREEDY)) == model.generate("w4 w5 w6 w7", 2, **GREEDY)


def test_a_prefix_grows() -> None:
    model, tokens = toy("rotary"), ids(1, 10)
    longer = model.prefix(model.prefix(tokens[:, :4]) + tokens[:, 4:7], names_filter=SITE)
    assert torch.equal(longer.tokens, tokens[:, :7])
    assert longer.cache[SITE].shape[1] == 3
    assert_close(model(longer + tokens[:, 7:]), model(tokens)[:, 7:])
    several = model.prefix(model.prefix(tokens[:, :4]) + ids(2, 3))
    assert_close(model(several + tokens[:, 7:])[1], model(torch.cat([several.tokens[1:], tokens[:, 7:]], 1))[0, 7:])


def test_embeddings_may_be_a_prefix() -> None:
    model, tokens = toy("standard"), ids(1, 10)
    prefix = model.prefix(model.embed(tokens[:, :N_PREFIX]))
    assert_close(model(prefix + tokens[:, N_PREFIX:]), model(tokens)[:, N_PREFIX:])
    assert_close(model.prefix(model.embed(tokens[:, :N_PREFIX]), chunk=4).logits, prefix.logits)
    found = model.generate(prefix + tokens[:, N_PREFIX:], 3, return_type="tokens", **GREEDY)
    assert torch.equal(found[:, -3:], model.generate(tokens, 3, **GREEDY)[:, -3:])


@pytest.mark.parametrize("case", thinned(VISION_LANGUAGES, keep=VISION_LANGUAGES[:1]), ids=str)
@torch.no_grad()
def test_images_belong_to_the_prefix(case: Any) -> None:
    model = hooked_any(case)
    inputs = model.inputs(model.drawn_inputs())
    beginning = replace(inputs, tokens=inputs.tokens[:, :-2])
    prefix, last = model.prefix(beginning), inputs.tokens[:, -2:]
    assert torch.equal(model.generate(prefix, 3, **GREEDY), model.generate(beginning, 3, **GREEDY))
    if case.family == "paligemma":
        with pytest.raises(ValueError, match="reads a prompt in both directions"):
            model(prefix + last)
        return
    assert_close(model(prefix + last), model(inputs)[:, -2:])
    with pytest.raises(ValueError, match="images and embeddings belong"):
        prefix + inputs
    with pytest.raises(ValueError, match="an image may not be cut"):
        model.prefix(beginning, chunk=3)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_activations_of_the_prefix() -> None:
    model, tokens = toy("rotary"), ids(2, N_PREFIX)
    prefix = model.prefix(tokens, names_filter=["hook_embed", "z1"])
    _, cache = model.run_with_cache(tokens)
    assert set(prefix.cache) == {"hook_embed", "blocks.1.attn.hook_z"}
    assert_close(prefix.cache["z", 1], cache["z", 1])
    assert model.prefix(tokens).cache is None


def test_functions_see_the_new_positions() -> None:
    model, seen = toy("rotary", words()), []

    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append((hook.step, hook.positions.tolist(), value.shape[1]))  # type: ignore[union-attr]

    prefix = model.prefix("w4 w5 w6")
    model.run_with_hooks(prefix + CONTINUATIONS, fwd_hooks=[(SITE, note)])
    assert seen == [(0, [[4, 5], [-1, 4]], 2)]
    model("w4")
    assert len(seen) == 1


@pytest.mark.parametrize("positions", [-1, [6, -2], slice(7, None), "last_prompt", "generated"])
def test_positions_of_hooks_mean_what_they_mean_in_the_whole_prompt(positions: Any) -> None:
    model, tokens = toy("rotary"), ids(2, 10)
    tokens[1, :N_PREFIX] = tokens[0, :N_PREFIX]
    prefix, hook = model.prefix(tokens[:1, :N_PREFIX]), Scale(SITE, factor=3.0, positions=positions)
    prompt = prefix + tokens[:, N_PREFIX:]
    with model.hooks([hook]):
        if positions != "generated":  # no token of a plain run
            assert_close(model(prompt), model(tokens)[:, N_PREFIX:])
        assert torch.equal(model.generate(prompt, 3, **GREEDY), model.generate(tokens, 3, **GREEDY))


def test_padding_before_new_tokens_is_no_position_of_a_hook() -> None:
    model, first = toy("rotary"), ids(1, N_PREFIX)
    tokens, mask, whole = rows_after(first, 4, 1)
    hook = Scale(SITE, factor=3.0, positions=[N_PREFIX])
    found = model.run_with_hooks(model.prefix(first).then(tokens, mask), fwd_hooks=[hook])
    for i, row in enumerate(whole):
        with model.hooks([hook]):
            assert_close(found[i, N_PREFIX - len(row) :], model(row[None])[0, N_PREFIX:])


@pytest.mark.parametrize("positions", [None, "all", "prompt", 2, [7, 5], -5, slice(None, 8), slice(2, None), 10, 99])
def test_a_hook_that_would_have_changed_the_prefix_is_refused(positions: Any) -> None:
    model, hook = toy("rotary"), Scale(SITE, factor=3.0, positions=positions)
    prefix, new = model.prefix(ids(1, N_PREFIX)), ids(1, 4)
    with pytest.raises(ValueError, match=r"positions 6 to 9 follow the prefix.*compute the prefix inside"):
        model.run_with_hooks(prefix + new, fwd_hooks=[hook])
    with pytest.raises(ValueError, match="follow the prefix"):
        model.run_with_cache(prefix + new, fwd_hooks=[hook], chunk=2)
    if positions != 10:  # the first token that is generated
        with model.hooks([hook]), pytest.raises(ValueError, match="follow the prefix"):
            model.generate(prefix + new, 3, **GREEDY)
    hook.disable()
    assert_close(model.run_with_hooks(prefix + new, fwd_hooks=[hook]), model(prefix + new))


class Halve:
    """A hook object that says nothing of its positions."""

    hook_point = SITE

    def __call__(self, value: Tensor, hook: HookPoint) -> Tensor:
        return value / 2


@pytest.mark.parametrize("positions", [None, "prompt", 2, [7, 5], slice(2, None)])
def test_a_hook_may_be_open_where_the_prefix_is_computed(positions: Any) -> None:
    model, tokens, hook = toy("rotary"), ids(1, 10), AddDirection(SITE, vector=torch.ones(32), positions=positions)
    with model.hooks([hook]):
        prefix = model.prefix(tokens[:, :N_PREFIX])
        assert_close(model(prefix + tokens[:, N_PREFIX:]), model(tokens)[:, N_PREFIX:])
        assert torch.equal(model.generate(prefix + tokens[:, 6:], 3, **GREEDY), model.generate(tokens, 3, **GREEDY))
    assert "AddDirection" in repr(prefix)
    with (
        model.hooks([AddDirection(SITE, vector=torch.ones(32), positions=positions)]),
        pytest.raises(ValueError, match="foll"),
    ):
        model(prefix + tokens[:, N_PREFIX:])


@pytest.mark.parametrize("positions", [-1, [2, -1], slice(1, -1), "last_prompt"])
def test_what_counts_from_the_end_is_unknown_in_a_prefix(positions: Any) -> None:
    model = toy("rotary")
    with (
        model.hooks([Scale(SITE, factor=3.0, positions=positions)]),
        pytest.raises(ValueError, match="counts from the end"),
    ):
        model.prefix(ids(1, N_PREFIX))


def test_objects_without_positions_change_all_and_recorders_none() -> None:
    model, new = toy("rotary"), ids(1, 4)
    prefix = model.prefix(ids(1, N_PREFIX))
    with pytest.raises(ValueError, match="Halve"):
        model.run_with_hooks(prefix + new, fwd_hooks=[Halve()])
    seen = Record(SITE)
    model.run_with_hooks(prefix + new, fwd_hooks=[seen])
    assert seen.values[SITE][0].shape[1] == 4


def test_token_ids_are_known_after_a_prefix_and_in_chunks() -> None:
    model = toy("rotary", words())
    inputs = InputTokens.of(model)
    model.run_with_hooks(model.prefix("w4 w5 w6") + CONTINUATIONS, fwd_hooks=[inputs])
    assert inputs.ids[-1].tolist() == [[7, 8], [0, 9]]
    assert inputs.mask[-1].tolist() == [[True, True], [False, True]]
    model.run_with_cache("w4 w5 w6 w7", chunk=2, fwd_hooks=[inputs])
    assert inputs.latest is not None
    assert inputs.latest.ids.tolist() == [[0, 4, 5, 6, 7]]


# ---- what it depends on ----------------------------------------------------------------------------------------------


def add_in_place(model: HookedTransformer) -> None:
    with torch.no_grad():
        model.blocks[1].mlp.W_in += 1


def replace_weight(model: HookedTransformer) -> None:
    model.blocks[1].mlp.W_in = nn.Parameter(model.blocks[1].mlp.W_in.detach().clone())


def replace_values(model: HookedTransformer) -> None:
    model.blocks[1].mlp.W_in.data = model.blocks[1].mlp.W_in.data.clone()


def load(model: HookedTransformer) -> None:
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("change", [add_in_place, replace_weight, replace_values, load])
def test_changed_weights_are_noticed(change: Callable[[HookedTransformer], None]) -> None:
    model = toy("standard")
    prefix, weights = model.prefix(ids(1, N_PREFIX)), dict(model.named_parameters())
    model(prefix + ids(1, 2))
    change(model)
    assert weights.keys() == dict(model.named_parameters()).keys()  # those that were replaced are still there
    for run in (model, model.generate, lambda prompt: model.run_with_cache(prompt, chunk=1)):
        with pytest.raises(ValueError, match=r"changed after this prefix was computed; compute it again"):
            run(prefix + ids(1, 2))


def test_the_model_its_dtype_and_its_class_are_those_of_the_prefix() -> None:
    model = toy("standard")
    prefix = model.prefix(ids(1, N_PREFIX))
    with pytest.raises(ValueError, match="another model"):
        copy.deepcopy(model)(prefix + ids(1, 2))
    model.to(torch.float64)
    with pytest.raises(ValueError, match=r"dtype torch.float32, and the model now has torch.float64"):
        model(prefix + ids(1, 2))
    encoder = HookedEncoder({"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 8, "d_vocab": 10, "act_fn": "gelu"})
    with pytest.raises(ValueError, match="this is a HookedEncoder"):
        encoder.prefix(ids(1, 3))
    with pytest.raises(ValueError, match="that of layer 0 is bidirectional"):
        toy(BOTH_WAYS).prefix(ids(1, 3))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda model, prefix: model(prefix), "nothing follows the prefix"),
        (lambda model, prefix: prefix + ids(1, 3)[:, :0], "empty"),
        (lambda model, prefix: model.prefix(ids(3, 4)) + ids(2, 3), "3 rows, and 2 are to follow"),
        (lambda model, prefix: model.prefix(ids(3, 4)).repeated(2), "3 rows, and 2 are to follow"),
        (lambda model, prefix: prefix.repeated(0), "and 0 are to follow"),
        (lambda model, prefix: prefix + torch.zeros(1, 2, 32), "embeddings belong into the prefix"),
        (lambda model, prefix: model(prefix + ids(1, 3), attention_mask=torch.ones(1, 3)), "prefix.then"),
        (lambda model, prefix: model(prefix + ids(1, 3), start_at_layer=1), "start_at_layer is settled"),
        (lambda model, prefix: model.generate(prefix + ids(1, 3), prepend_bos=True), "prepend_bos is settled"),
        (lambda model, prefix: model.generate(prefix, use_past_kv_cache=False), "omit use_past_kv_cache"),
        (lambda model, prefix: model(prefix + ids(1, 20)), "more than the model's n_ctx"),
        (lambda model, prefix: model.prefix(ids(1, 30)), "n_ctx"),
        (lambda model, prefix: model.generate(prefix, 30, stop_at_eos=False), "do not fit the model's n_ctx"),
    ],
)
def test_refusals(run: Callable[[Any, Any], Any], message: str) -> None:
    model = toy("standard")
    with pytest.raises(ValueError, match=message):
        run(model, model.prefix(ids(1, N_PREFIX)))


TOOLS: dict[str, Callable[..., object]] = {
    "sweep": lambda model, prompt: patching.sweep(model, prompt, prompt, answers=(3, 4)),
    "ablate": lambda model, prompt: patching.ablate(model, prompt, answers=(3, 4)),
    "run_each": lambda model, prompt: patching.run_each(model, prompt, [Scale(SITE, factor=0.0)], answers=(3, 4)),
    "attribute": lambda model, prompt: analysis.attribute(model, prompt, prompt, answers=(3, 4)),
    "logit_lens": lambda model, prompt: analysis.logit_lens(model, prompt),
    "head_scores": lambda model, prompt: analysis.head_scores(model, prompt),
    "direct_logit_attribution": lambda model, prompt: analysis.direct_logit_attribution(model, prompt, 3, 4),
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_of_whole_prompts_refuse_a_prefix_by_name(name: str) -> None:
    model = toy("rotary")
    prefix = model.prefix(ids(1, 4))
    for prompt in (prefix, prefix + ids(1, 3)):
        with pytest.raises(TypeError, match=rf"of {name} may not be a prefix.*give the whole prompts"):
            TOOLS[name](model, prompt)


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rotary", "windowed", "shortformer"])
@pytest.mark.parametrize("chunk", [1, 4, 10, 99])
def test_a_run_in_chunks_is_the_whole_run(kind: str, chunk: int) -> None:
    model, tokens = toy(kind), ids(2, 10)
    logits, cache = model.run_with_cache(tokens)
    found, joined = model.run_with_cache(tokens, chunk=chunk)
    assert_close(found, logits)
    assert set(joined) == set(cache)
    for name in cache:
        assert_close(joined[name].nan_to_num(0, 0, 0), cache[name].nan_to_num(0, 0, 0), scale=10.0, msg=name)
    assert torch.equal(model.generate(tokens, 4, chunk=chunk, **GREEDY), model.generate(tokens, 4, **GREEDY))
    assert_close(model.prefix(tokens, chunk=chunk).logits, logits[:, -1])


@pytest.mark.parametrize(
    ("kind", "chunk"), [("rotary", 1), ("rotary", "40KB"), ("rotary", "auto"), ("windowed", 4), ("shortformer", 4)]
)
def test_a_forward_pass_in_chunks_is_the_whole_one(kind: str, chunk: int | str) -> None:
    model, (tokens, mask) = toy(kind, words()), padded([ids(1, n, seed=n)[0] for n in (10, 6)], "left")
    prefix = model.prefix(ids(1, 5))
    for prompt, how in (
        (tokens, {"attention_mask": mask}),
        (ids(3, 10), {}),
        ("w4 w5 w6 w7", {}),
        (prefix + ids(2, 6), {}),
        (prefix.then(tokens, mask), {}),
    ):
        expected = model(prompt, **how)
        real = torch.ones(expected.shape[:2]).bool() if prompt is not tokens else mask.bool()
        assert_close(model(prompt, chunk=chunk, **how)[real], expected[real])
        assert_close(model(prompt, "loss", chunk=chunk, **how), model(prompt, "loss", **how))
        per_token, of_whole = (
            model(prompt, "loss", loss_per_token=True, **how, **some) for some in ({"chunk": chunk}, {})
        )
        assert_close(per_token, of_whole)
        both = model(prompt, return_type="both", chunk=chunk, **how)
        assert_close(both.logits[real], expected[real])
        assert_close(both.loss, model(prompt, "loss", **how))
        assert model(prompt, return_type=None, chunk=chunk, **how) is None


def passes(model: HookedTransformer, run: Callable[[], object]) -> list[int]:
    """The number of tokens in each pass of a run."""
    seen: list[int] = []

    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append(value.shape[1])

    with model.hooks([("hook_embed", note)]):
        run()
    return seen


def test_a_size_is_as_many_tokens_as_fit() -> None:
    model, tokens = toy("rotary"), ids(2, 20)
    for run in (model, model.prefix, lambda some, chunk: model.generate(some, 1, chunk=chunk, **GREEDY)):
        few, more, all_fit = (passes(model, lambda c=c: run(tokens, chunk=c)) for c in ("20KB", "40KB", "auto"))  # noqa: B023
        assert sum(few) == sum(more) == 20
        assert 0 < few[0] < more[0] < 20
        assert few[0] <= more[0] // 2
        assert all_fit == [20]
    plain = passes(model, lambda: model(tokens, chunk="40KB"))
    with_scores = passes(model, lambda: model.run_with_cache(tokens, names_filter="pattern1", chunk="40KB"))
    half_as_many = passes(model, lambda: model(tokens[:1], chunk="40KB"))
    assert with_scores[0] < plain[0] < half_as_many[0]


@pytest.mark.parametrize(
    ("names", "n_layers"), [("hook_embed", 1), ("z1", 2), ("resid_post2", 3), (["mlp_out0", "q0"], 1)]
)
def test_passes_end_after_the_last_layer_that_is_needed(names: Any, n_layers: int) -> None:
    model, tokens, seen = toy("rotary"), ids(2, 10), []

    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append(hook.layer())

    _, expected = model.run_with_cache(tokens, names_filter=names)
    with model.hooks([(f"blocks.{layer}.hook_resid_pre", note) for layer in range(n_layers)]):
        output, cache = model.run_with_cache(tokens, names_filter=names, return_type=None, chunk=4)
    assert output is None
    assert seen == [*range(n_layers)] * 3
    for name in expected:
        assert_close(cache[name], expected[name])
    every, whole = [], [*range(3)] * 3
    with model.hooks(
        [(f"blocks.{layer}.hook_resid_pre", lambda value, hook: every.append(hook.layer())) for layer in range(3)]
    ):
        model.run_with_cache(tokens, names_filter=names, chunk=4)
    assert every == whole  # for the logits


def test_padded_rows_in_chunks() -> None:
    model = toy("rotary")
    rows = [ids(1, n, seed=n)[0] for n in (10, 3)]
    tokens, mask = padded(rows, "right")
    found, cache = model.run_with_cache(tokens, chunk=4, attention_mask=mask)
    for i, row in enumerate(rows):
        logits, alone = model.run_with_cache(row[None])
        assert_close(found[i, -len(row) :], logits[0])
        assert_close(cache[SITE][i, -len(row) :], alone[SITE][0])
    assert cache.attention_mask.sum(1).tolist() == [10, 3]


@pytest.mark.parametrize("positions", [-1, None, 2, [0, -3], slice(1, -2), slice(-6, None), "prompt", "last_prompt"])
def test_positions_in_chunks_are_those_of_the_whole_prompt(positions: Any) -> None:
    model, tokens, hook = toy("rotary"), ids(2, 10), Scale(SITE, factor=3.0, positions=positions)
    expected = model.run_with_hooks(tokens, fwd_hooks=[hook])
    found, _ = model.run_with_cache(tokens, fwd_hooks=[hook], chunk=4)
    assert_close(found, expected)
    assert_apart(found, model(tokens))
    with model.hooks([hook]):
        assert torch.equal(model.generate(tokens, 3, chunk=4, **GREEDY), model.generate(tokens, 3, **GREEDY))


def test_each_site_is_hooked_piece_by_piece() -> None:
    model, seen = toy("rotary"), []

    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append((hook.step, hook.positions.tolist(), value.shape[1]))  # type: ignore[union-attr]

    model.run_with_cache(ids(2, 5), names_filter="hook_embed", return_type=None, chunk=2, fwd_hooks=[(SITE, note)])
    assert seen == [(-3, [0, 1], 2), (-1, [2, 3], 2), (0, [4], 1)]
    seen.clear()
    with model.hooks([(SITE, note)]):
        model.generate(ids(2, 4), 1, chunk=3, **GREEDY)
    assert seen == [(-1, [0, 1, 2], 3), (0, [3], 1)]


def test_what_a_run_in_chunks_returns() -> None:
    model, tokens = toy("rotary"), ids(1, 10)
    output, cache = model.run_with_cache(
        tokens, names_filter=[SITE], return_type=None, chunk=3, remove_batch_dim=True, device="cpu"
    )
    assert output is None
    assert cache[SITE].shape == (10, 32)
    long = model.prefix(tokens) + ids(1, 7, seed=1)
    found, after = model.run_with_cache(long, chunk=3)
    whole, of_whole = model.run_with_cache(torch.cat([tokens, long.tokens], 1))
    assert_close(found, whole[:, 10:])
    assert_close(after["pattern", 1], of_whole["pattern", 1][:, :, 10:])


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda model: model.run_with_cache(ids(1, 4), chunk=0), ValueError, "at least 1, got 0"),
        (lambda model: model.run_with_cache(ids(1, 4), chunk=2, return_type="los"), ValueError, "got 'los'"),
        (lambda model: model(ids(1, 4), chunk=2, return_type="los"), ValueError, "got 'los'"),
        (lambda model: model(ids(1, 4), chunk=2, start_at_layer=1), TypeError, "start_at_layer"),
        (
            lambda model: model(model.embed(ids(1, 4)), chunk=2, return_type="loss"),
            ValueError,
            "a loss needs token ids",
        ),
        (lambda model: model(ids(1, 4), chunk="1KB"), ValueError, r"chunk='1KB' is too small: a token takes about"),
        (lambda model: model(ids(1, 4), chunk="large"), ValueError, "chunk must be a number of bytes or a size"),
        (lambda model: model.generate(ids(1, 4), chunk="1KB"), ValueError, "is too small"),
        (lambda model: model.run_with_cache(ids(1, 4), chunk=2, incl_bwd=True), TypeError, "no argument 'incl_bwd'"),
        (lambda model: model.run_with_cache(ids(1, 4), chunk=2, stop_at_layer=1), TypeError, "'stop_at_layer'"),
        (lambda model: model.generate(ids(1, 4), chunk=2, use_past_kv_cache=False), ValueError, "key/value cache"),
        (lambda model: toy(BOTH_WAYS).run_with_cache(ids(1, 4), chunk=2), ValueError, "bidirectional"),
        (lambda model: toy(BOTH_WAYS).generate(ids(1, 4), chunk=2), ValueError, "bidirectional"),
    ],
)
def test_chunks_that_are_refused(run: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(toy("rotary"))
