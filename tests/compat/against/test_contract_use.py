"""What users do with models, beside the original: predicates on names, negative ids, handles and levels, words for masks."""

import copy
from collections.abc import Callable
from typing import Any

import originals
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from hooked_lm.hooks.select import site_glob
from tests.close import assert_apart, assert_close

Predicate = Callable[[str], bool]

# ---- predicates ------------------------------------------------------------------------------------------------------

# In a cache of theirs alone, and of ours alone: see test_values.py.
UNEMBED = {"unembed.hook_in", "unembed.hook_out"}
EXPERTS = {f"blocks.*.mlp.experts.*.hook_{leaf}" for leaf in ("gate", "pre", "post")}
HEADS = {"mlm_head.hook_pre", "mlm_head.hook_post", "pooler.hook_pooler_out", "nsp_head.hook_nsp_out"}
ONLY_OURS = {
    "mixtral": {"blocks.*.mlp.hook_router_logits"},
    "bert": HEADS | {"blocks.*.hook_normalized_resid_mid"},
    "t5": {
        *(f"{side}_rel_pos_bias.hook_bias" for side in ("encoder", "decoder")),
        *("hook_encoder_out", "hook_decoder_embed"),
    },
}
PREDICATES: dict[str, Predicate] = {
    "all": lambda name: True,
    "inputs": lambda name: name.endswith("hook_in"),
    "inputs of MLPs": lambda name: "mlp.hook_in" in name,
    "streams": lambda name: "resid_p" in name,
    "a layer": lambda name: ".1." in name and name.endswith(("hook_z", "hook_mlp_out", "hook_q")),
    "divisors": lambda name: name.endswith("hook_scale"),
    "the end": lambda name: name.startswith("unembed"),
}
VERBS = ("run_with_cache", "run_with_hooks", "hooks", "add_hook")


def called(model: Any, inputs: tuple[Tensor, ...], verb: str, predicate: Predicate) -> list[str] | None:
    """The sites that come by, in their order, each once; None if the verb refuses the predicate."""
    seen: list[str] = []

    def note(value: Tensor, hook: Any) -> None:
        seen.append(hook.name)

    try:
        with torch.no_grad():
            if verb == "run_with_cache":
                seen = list(model.run_with_cache(*inputs, names_filter=predicate)[1])
            elif verb == "run_with_hooks":
                model.run_with_hooks(*inputs, fwd_hooks=[(predicate, note)])
            elif verb == "hooks":
                with model.hooks(fwd_hooks=[(predicate, note)]):
                    model(*inputs)
            else:
                model.add_hook(predicate, note)
                model(*inputs)
    except AssertionError:
        return None
    finally:
        model.reset_hooks()
    return list(dict.fromkeys(seen))


@pytest.mark.filterwarnings("ignore:the filter .* selects none")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", originals.NAMES)
def test_the_same_sites_answer_a_predicate(name: str, verb: str) -> None:
    """But for sites of one library alone: where theirs has none, ours on demand are meant. `add_hook` of theirs refuses a
    predicate that holds for a site which is behind a flag."""
    pair = originals.pair(name)
    for title, predicate in PREDICATES.items():
        ours, theirs = (called(model, pair.inputs, verb, predicate) for model in pair.both)
        assert ours is not None
        if theirs is None:
            assert (verb, title) == ("add_hook", "all")
            theirs = called(pair.theirs, pair.inputs, "hooks", predicate) or []
        if title == "inputs of MLPs":
            assert theirs == []
            assert ours == [site for site in pair.ours.all_points() if site.endswith("mlp.hook_in")]
            continue
        alone = UNEMBED | EXPERTS if title == "all" else set()
        assert {site_glob(site) for site in {*theirs} - {*ours}} <= alone, title
        assert {site_glob(site) for site in {*ours} - {*theirs}} <= ONLY_OURS.get(name, set()), title
        late = "embed.hook_token_type_embed"  # BERT's types, which ours adds before positions, as transformers does
        both = {*ours} & {*theirs} - {late}
        assert [site for site in ours if site in both] == [site for site in theirs if site in both], title
        assert both or (title, name) == ("divisors", "toy-bare")
    assert called(pair.ours, pair.inputs, verb, PREDICATES["inputs"]) == ["unembed.hook_in"]


def test_a_predicate_that_holds_for_everything_is_the_bare_cache() -> None:
    for name in originals.NAMES:
        pair = originals.pair(name)
        for model in pair.both:
            with torch.no_grad():
                bare = model.run_with_cache(*pair.inputs)[1]
            assert called(model, pair.inputs, "run_with_cache", PREDICATES["all"]) == list(bare)


def test_a_function_on_a_predicate_changes_the_same_sites() -> None:
    pair = originals.pair("llama")
    hooks = [(PREDICATES["inputs"], lambda value, hook: 0.5 * value)]
    with torch.no_grad():
        ours, theirs = (model.run_with_hooks(*pair.inputs, fwd_hooks=hooks) for model in pair.both)
        assert_close(ours, theirs)
        assert_apart(ours, pair.ours(*pair.inputs))


# ---- token ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", originals.NAMES)
def test_negative_ids_count_from_the_end(name: str) -> None:
    pair = originals.pair(name)
    negative = tuple(torch.where(torch.arange(x.shape[1]) % 2 == 0, x - 61, x) for x in pair.inputs)
    with torch.no_grad():
        ours, theirs = (model(*negative) for model in pair.both)
        assert torch.equal(ours, pair.ours(*pair.inputs))
    assert_close(ours, theirs)


@pytest.mark.parametrize("wrong", [61, -62])
@pytest.mark.parametrize("name", originals.NAMES)
def test_ids_out_of_range(name: str, wrong: int) -> None:
    """An error in both; ours says which id it is, and where."""
    pair = originals.pair(name)
    inputs = tuple(torch.cat([x[:, :-1], torch.full_like(x[:, :1], wrong)], 1) for x in pair.inputs)
    with pytest.raises(IndexError):
        pair.theirs(*inputs)
    with pytest.raises(ValueError, match=rf"token id {wrong} at \[0, "):
        pair.ours(*inputs)


# ---- handles and levels ----------------------------------------------------------------------------------------------

SITE = "blocks.1.hook_resid_pre"


def double(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


@pytest.mark.parametrize("dir", ["fwd", "bwd"])
def test_handles(dir: str) -> None:
    """A handle is PyTorch's there; it knows its id, and the hooks among which it is until it is removed."""
    for model in originals.pair("gpt2").both:
        point = model.hook_dict[SITE]
        try:
            model.add_hook(SITE, double, dir=dir)
            model.add_hook(SITE, double, dir=dir, level=3, is_permanent=True)
            handles = getattr(point, f"{dir}_hooks")
            first, second = (handle.hook for handle in handles)
            assert [handle.is_permanent for handle in handles] == [False, True]
            assert [handle.context_level for handle in handles] == [None, 3]
            assert [handle.user_hook for handle in handles] == [double, double]
            assert first.id != second.id
            assert {first.id, second.id} <= set(first.hooks_dict_ref()) == set(second.hooks_dict_ref())
            first.remove()
            assert first.id not in first.hooks_dict_ref()
            assert second.id in second.hooks_dict_ref()
        finally:
            model.reset_hooks(including_permanent=True)
        assert not point.has_hooks()


def test_levels_set_by_hand() -> None:
    pair, logits = originals.pair("gpt2"), []
    for model in pair.both:
        assert model.context_level == 0
        model.context_level += 1
        model.add_hook(SITE, double, level=model.context_level)
        model.add_hook("blocks.0.hook_mlp_out", double)
        with model.hooks(fwd_hooks=[("hook_embed", double)]), torch.no_grad():
            assert model.context_level == 2
            logits.append(model(*pair.inputs))
        model.reset_hooks(level=model.context_level)
        model.context_level -= 1
        with torch.no_grad():
            logits.append(model(*pair.inputs))
        assert list(model.list_hooks()) == ["blocks.0.hook_mlp_out"]
        model.reset_hooks()
        assert model.context_level == 0
    assert_close(logits[0], logits[2])
    assert_close(logits[1], logits[3])
    assert_apart(logits[0], logits[1])


def test_a_point_says_its_name_and_whether_it_has_hooks() -> None:
    for model in originals.pair("gpt2").both:
        model = copy.deepcopy(model)
        point = model.hook_dict[SITE]
        bare = repr(point)
        assert bare.startswith("HookPoint(")
        assert repr(SITE) in bare
        point.add_hook(double)
        point.add_hook(double, dir="bwd")
        assert repr(point) != bare
        assert any(said in repr(point) for said in ("2 hooks", "1 fwd, 1 bwd"))
        assert repr(type(point)()) == "HookPoint()"


# ---- new weights -----------------------------------------------------------------------------------------------------

NEW: dict[str, dict[str, Any]] = {
    "LN": {"normalization_type": "LN", "act_fn": "gelu"},
    "bare": {"normalization_type": None, "act_fn": "relu", "d_mlp": 40, "d_vocab_out": 9},
    "no MLPs": {"normalization_type": "LNPre", "attn_only": True, "positional_embedding_type": "shortformer"},
    "grouped": {
        "normalization_type": "RMS",
        "act_fn": "silu",
        "gated_mlp": True,
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
    },
}
MODES = ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"]
# There the widths of an axis of heads are left out of W_O's, and an unembedding is taken for an embedding.
OTHER_SCALE = {"gpt2": (), "muP": ("W_O", "W_U")}


def new(library: Any, fields: dict[str, Any]) -> tuple[Any, Tensor]:
    """A model, and what torch's generator gives after it."""
    torch.manual_seed(5)
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 32, "d_head": 8, "d_vocab": 12, "n_ctx": 5, "device": "cpu"}
    return library.HookedTransformer({**sizes, **fields}), torch.rand(3)


@pytest.mark.parametrize("seed", [None, 999])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", NEW)
def test_new_weights_are_the_same_numbers(kind: str, mode: str, seed: int | None) -> None:
    """Of one seed, the config's or torch's, so that what was trained from it is trained again."""
    fields = {**NEW[kind], "init_mode": mode, "seed": seed}
    (ours, then), (theirs, then_there) = (new(lib, fields) for lib in (originals.hooked_lm, originals.transformer_lens))
    there = {name.replace("._", "."): weight for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        if name.endswith("b_gate"):  # theirs has none
            assert not weight.any()
            continue
        if not name.endswith(OTHER_SCALE.get(mode, ("W_O",))):
            assert_close(weight, there[name], 1, msg=name)
        if mode == "gpt2":
            assert torch.equal(weight, there[name]), name
    if seed is None:
        assert torch.equal(then, then_there)


# ---- words for masked tokens -----------------------------------------------------------------------------------------


def words() -> Any:
    """A tokenizer of 61 words, which begins with [CLS] and ends with [SEP], as BERT's does."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    known = [*special, *(f"w{i}" for i in range(61 - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


@pytest.mark.parametrize("text", ["w3 [MASK] w7", "w3 [MASK] w7 [MASK] w9", ["w1 [MASK]", "[MASK] w5"]])
def test_predictions_of_an_encoder(text: Any) -> None:
    pair, found = originals.pair("bert"), []
    for model in pair.both:
        model = copy.deepcopy(model)
        model.tokenizer = words()
        found.append(model(text, return_type="predictions"))
    assert found[0] == found[1]
    assert "w" in str(found[0])


def test_ids_of_two_sentences_say_where_the_second_begins() -> None:
    pair, found = originals.pair("bert"), []
    tokens, types = pair.inputs[0][:1], torch.arange(9)[None] // 5
    for model, library in zip(pair.both, (originals.hooked_lm, originals.transformer_lens), strict=True):
        asked = library.BertNextSentencePrediction(model)
        with pytest.raises(ValueError, match="token_type_ids"):
            asked(tokens)
        with torch.no_grad():
            found.append(asked(tokens, token_type_ids=types))
    assert_close(*found)
    assert_apart(found[0], found[0].flip(-1))
