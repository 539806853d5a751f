"""Text and tokens, names of sites, and helpers, in both libraries, with the bundled tokenizer."""

import copy
import itertools
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from originals import assert_close, demo, transformer_lens
from transformers import AutoTokenizer

import hooked_lm
from hooked_lm import utils
from hooked_lm.compat.tokenizers import with_specials
from hooked_lm.models.config import defaults
from tests.compat.toy_tokenizers import KINDS, toy_tokenizer

THEIRS = transformer_lens.utilities
TEXT = "When Mary and John went to the store"
TEXTS = [TEXT, "John gave a drink", "Mary"]
SIDES, BOS = (None, "left", "right"), (None, True, False)


def same(ours: Any, theirs: Any, what: Any = "") -> None:
    """Tensors, or anything else, the same."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), what
    else:
        assert ours == theirs, what


def theirs_has(**options: Any) -> dict[str, Any]:
    """Theirs has a value of its own for what is not given, where ours has None."""
    return {key: value for key, value in options.items() if value is not None}


# ---- the tokenizer of a decoder --------------------------------------------------------------------------------------

NOT_THERE = "nothing", "appends"  # there tokens are invented, and one of text is lost


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_THERE])
def test_the_tokenizer_under_the_lent_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it adds and where it pads, and the ids of the texts of a data set."""
    monkeypatch.setattr(defaults, "tokenizer_for", with_specials)
    monkeypatch.setattr(defaults, "padding_side", None)
    toy_tokenizer(kind).save_pretrained(tmp_path)
    sizes = {"n_layers": 1, "d_model": 8, "d_head": 4, "n_ctx": 16, "d_vocab": 8, "act_fn": "relu", "device": "cpu"}
    found = []
    for library, helpers in ((hooked_lm, utils), (transformer_lens, THEIRS)):
        model = library.HookedTransformer(
            library.HookedTransformerConfig(**sizes), tokenizer=AutoTokenizer.from_pretrained(tmp_path)
        )
        made, data = model.tokenizer, datasets.Dataset.from_dict({"text": ["a b a", "b b"] * 40})
        rows = helpers.tokenize_and_concatenate(data, made, max_length=8, num_proc=None)
        found.append(
            [
                (made.bos_token, made.eos_token, made.pad_token, made.padding_side),
                made(["a b", "a"], padding=True)["input_ids"],
                made.encode("a", add_special_tokens=False),
                model.cfg.tokenizer_prepends_bos,
                *(model.to_tokens(["a b", "a"], prepend_bos=bos).tolist() for bos in (True, False)),
                [torch.as_tensor(row["tokens"]).tolist() for row in rows],
            ]
        )
    assert found[0] == found[1]


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, TEXTS, [TEXT], "", "x" * 400], ids=["one", "some", "a list", "none", "long"])
@pytest.mark.parametrize(("bos", "side"), list(itertools.product((None, True), SIDES)))
def test_tokens(text: Any, bos: bool | None, side: str | None):
    both = demo()
    sides = [model.tokenizer.padding_side for model in both.both]
    ours = both.ours.to_tokens(text, prepend_bos=bos, padding_side=side)
    same(ours, both.theirs.to_tokens(text, **theirs_has(prepend_bos=bos, padding_side=side)))
    assert [model.tokenizer.padding_side for model in both.both] == sides
    if len(text) == 400:
        longer = [m.to_tokens(text, truncate=False, move_to_device=False) for m in both.both]
        same(*longer)
        assert longer[0].shape[1] > ours.shape[1] == 128


@pytest.mark.parametrize("side", SIDES)
def test_tokens_without_bos(side: str | None):
    """Theirs cuts a long text before it takes the BOS token away, so it comes out a token short; of no text it gives no tokens,
    which no model can run on and ours refuses."""
    both, more = demo(), theirs_has(padding_side=side)
    for text in (TEXT, TEXTS, [TEXT]):
        ours = both.ours.to_tokens(text, prepend_bos=False, padding_side=side)
        same(ours, both.theirs.to_tokens(text, prepend_bos=False, **more))
    ours, theirs = (model.to_tokens("x" * 400, prepend_bos=False) for model in both.both)
    assert (ours.shape[1], theirs.shape[1]) == (128, 127)
    same(ours[:, :127], theirs)
    assert both.theirs.to_tokens("", prepend_bos=False, **more).shape == (1, 0)
    with pytest.raises(ValueError, match="zero tokens"):
        both.ours.to_tokens("", prepend_bos=False, padding_side=side)


@pytest.mark.parametrize("bos", BOS)
def test_strings_of_tokens(bos: bool | None):
    both = demo()
    ids = both.ours.to_tokens(TEXT)
    options = theirs_has(prepend_bos=bos)
    for given in (TEXT, ids, ids[0], ids[0].numpy(), TEXTS, ids[0, 3]):
        ours = both.ours.to_str_tokens(given, prepend_bos=bos)
        same(ours, both.theirs.to_str_tokens(given, **options), given)
    for given in (ids, ids[0], ids[0].tolist(), ids.numpy(), ids[0, 3]):
        same(both.ours.to_string(given), both.theirs.to_string(given), given)


def test_single_tokens():
    both = demo()
    for word in (" Mary", " John", "When", ","):
        number = both.ours.to_single_token(word)
        same(number, both.theirs.to_single_token(word))
        same(both.ours.to_single_str_token(number), both.theirs.to_single_str_token(number))
    for model, error in zip(both.both, (ValueError, AssertionError), strict=True):
        with pytest.raises(error):
            model.to_single_token(" Mary John")
    text = "When Mary and Mary"
    for mode, bos, single in itertools.product(("first", "last"), BOS, (" Mary", both.ours.to_single_token(" Mary"))):
        found = both.ours.get_token_position(single, text, mode, prepend_bos=bos)
        same(found, both.theirs.get_token_position(single, text, mode, **theirs_has(prepend_bos=bos)))
    ids = both.ours.to_tokens(text)
    same(both.ours.get_token_position(" and", ids), both.theirs.get_token_position(" and", ids[0]))


def test_directions_of_tokens():
    both = demo()
    ids = both.ours.to_tokens(TEXTS)
    for given in (" Mary", 7, torch.tensor(7), ids[0], ids):
        found = both.ours.tokens_to_residual_directions(given)
        assert_close(found, both.theirs.tokens_to_residual_directions(given), given)


@pytest.mark.parametrize(("bos", "side"), list(itertools.product(BOS, SIDES)))
def test_a_run_on_text(bos: bool | None, side: str | None):
    """Strings of unequal length. Theirs counts the padding on the right in the loss, unless it is given a mask."""
    both = demo()
    with torch.no_grad():
        ours = both.ours(TEXTS, return_type="both", prepend_bos=bos, padding_side=side)
        theirs = both.theirs(TEXTS, return_type="both", **theirs_has(prepend_bos=bos, padding_side=side))
        real = torch.tensor([len(row) for row in both.ours.to_str_tokens(TEXTS, prepend_bos=bos)])
    at = torch.arange(ours.logits.shape[1])
    mask = at >= len(at) - real[:, None] if side == "left" else at < real[:, None]
    assert_close(ours.logits[mask], theirs.logits[mask])
    masked = both.theirs.loss_fn(theirs.logits, both.ours.to_tokens(TEXTS, bos, side), mask.long())
    assert_close(ours.loss, masked)
    if side == "left":
        assert_close(ours.loss, theirs.loss)
    else:
        assert theirs.loss - masked > 0.1


def test_generated_text():
    both = demo()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "verbose": False}
    for text in (TEXT, "John gave a drink to"):
        for more in ({}, {"return_type": "str"}, {"prepend_bos": False}, {"stop_at_eos": False}, {"freq_penalty": 3.0}):
            same(both.ours.generate(text, **options, **more), both.theirs.generate(text, **options, **more), more)


# ---- names -----------------------------------------------------------------------------------------------------------

PLAIN = [
    "k",
    "q",
    "v",
    "z",
    "rot_k",
    "rot_q",
    "result",
    "pattern",
    "attn",
    "attn_scores",
    "attn_logits",
    "key",
    "query",
]
PLAIN += [
    "value",
    "pre",
    "post",
    "mid",
    "pre_linear",
    "mlp_pre",
    "mlp_mid",
    "mlp_post",
    "resid_pre",
    "resid_post",
    "resid_mid",
]
PLAIN += ["attn_out", "mlp_out", "attn_in", "mlp_in", "q_input", "k_input", "v_input"]
TYPES = [None, "a", "m", "b", "attn", "mlp", "block", "blocks", "attention", "ln1", "ln2"]


def test_names_of_sites():
    spelled = [(name, 3, kind) for name in [*PLAIN, "scale", "normalized"] for kind in TYPES]
    spelled += [(f"{name}6",) for name in PLAIN if name.isalpha()]
    spelled += [
        ("scale4ln1",),
        ("normalized2ln2",),
        ("k6a",),
        ("pre5",),
        ("scale",),
        ("normalized",),
        ("embed",),
        ("pos_embed",),
    ]
    spelled += [("blocks.3.attn.hook_z",), ("hook_embed",), ("ln_final.hook_scale",), ("resid_post", -1), ("z", 0)]
    for arguments in spelled:
        same(utils.get_act_name(*arguments), THEIRS.get_act_name(*arguments), arguments)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def test_losses_and_accuracy():
    logits, tokens = numbers(2, 6, 11), torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    for options in (
        {},
        {"per_token": True},
        {"attention_mask": mask},
        {"attention_mask": mask.bool(), "per_token": True},
    ):
        ours = utils.lm_cross_entropy_loss(logits, tokens, **options)
        assert_close(ours, THEIRS.lm_cross_entropy_loss(logits, tokens, **options), options)
    for per_token in (False, True):
        ours = utils.lm_accuracy(logits, tokens, per_token=per_token)
        assert_close(ours, THEIRS.lm_accuracy(logits, tokens, per_token=per_token))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "solu"])
def test_activations(name: str):
    x = numbers(2, 3, 5)
    assert_close(getattr(utils, name)(x), getattr(THEIRS, name)(x))


def test_tensors():
    x = numbers(4, 5, 6)
    same(utils.get_corner(x, 2), THEIRS.get_corner(x, 2))
    same(utils.remove_batch_dim(x[:1]), THEIRS.remove_batch_dim(x[:1]))
    same(utils.remove_batch_dim(x), THEIRS.remove_batch_dim(x))
    same(utils.repeat_along_head_dimension(x, 3), THEIRS.repeat_along_head_dimension(x, 3))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for offset in (0, 2):
        same(utils.get_offset_position_ids(offset, mask), THEIRS.get_offset_position_ids(offset, mask))
    for given in (x, x[0, 0].tolist(), 3.5, np.arange(3), True):
        ours, theirs = utils.to_numpy(given), THEIRS.to_numpy(given)
        assert type(ours) is type(theirs)
        assert np.array_equal(ours, theirs)
    assert utils.get_device() == str(THEIRS.get_device())


@pytest.mark.parametrize("part", [None, 2, -1, (1, 3), (0, 5, 2), [0, 3], np.array([1, 2])])
def test_slices(part: Any):
    x = numbers(2, 5, 3)
    ours, theirs = utils.Slice(part), THEIRS.Slice(part)
    for dim in (0, 1, -1) if part is None else (1, -2):
        same(ours.apply(x, dim), theirs.apply(x, dim))
    assert np.array_equal(ours.indices(5), theirs.indices(5))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_and_tokens_without_bos(side: str, bos: bool):
    ours, theirs = copy.deepcopy(demo().ours.tokenizer), copy.deepcopy(demo().theirs.tokenizer)
    ours.padding_side = theirs.padding_side = side
    tokens = demo().theirs.to_tokens(TEXTS, prepend_bos=bos, padding_side=side)
    same(utils.get_attention_mask(ours, tokens, bos), THEIRS.get_attention_mask(theirs, tokens, bos))
    if bos:
        found = utils.get_tokens_with_bos_removed(ours, tokens)
        same(found, THEIRS.get_tokens_with_bos_removed(theirs, tokens))


def test_sampling():
    """What can be drawn: the same number from the same state of the generator, since both draw from one softmax."""
    logits, seen = numbers(3, 40) * 3, torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(2))
    same(utils.sample_logits(logits, temperature=0.0), THEIRS.sample_logits(logits, temperature=0.0))
    many = logits[:1].expand(4000, -1)
    for options in (
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 0.5},
        {"freq_penalty": 2.0, "tokens": seen[:1].expand(4000, -1)},
    ):
        shares = []
        for library in (utils, THEIRS):
            torch.manual_seed(0)
            drawn = library.sample_logits(many.clone(), **options)
            shares.append(torch.bincount(drawn, minlength=40) / 4000)
        assert torch.equal(shares[0] > 0.02, shares[1] > 0.02) or "temperature" in options or "freq_penalty" in options
        assert_close(shares[0], shares[1], options, 0.05)


def test_rows_of_a_dataset():
    texts = [TEXT + ".", "John gave a drink to Mary.", TEXT + " and the garden."] * 6
    found = []
    for library, model in zip((utils, THEIRS), demo().both, strict=True):
        data = datasets.Dataset.from_dict({"text": texts})
        rows = library.tokenize_and_concatenate(data, model.tokenizer, max_length=16, num_proc=None)
        found.append(torch.stack([torch.as_tensor(row["tokens"]) for row in rows]))
    assert found[0].shape[1] == 16
    same(*found)


def test_prompts_are_tested(capsys: pytest.CaptureFixture[str]):
    """The rank of the answer and the likeliest tokens, as printed."""
    lines = []
    for library, model in zip((utils, THEIRS), demo().both, strict=True):
        library.test_prompt("When Mary and John went to the store, John gave a drink to", "Mary", model)
        printed = capsys.readouterr().out.splitlines()
        lines.append([line[line.index("Logit") :] for line in printed if line.startswith("Top")])
        lines[-1] += [line for line in printed if line.startswith("Rank")]
    assert len(lines[0]) == 12
    assert lines[0] == lines[1]
