"""The bundled model is read without transformers, and as transformers reads it."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hooked_lm import HookedTransformer
from hooked_lm.hub.bundled import DEMO, BundledConfig, BundledTokenizer
from hooked_lm.hub.hf_checkpoint import from_source, read_config
from hooked_lm.hub.options import Options
from hooked_lm.hub.source import find, tokenizer_in
from hooked_lm.models.text.bos import ids_of, prepends_bos
from hooked_lm.models.text.tokens import Tokens

TEXTS = ["Mary went to the store, and 1234 ways\n", "", " naïve 你好 <|endoftext|> x"]


@pytest.fixture
def lazy() -> Any:
    return tokenizer_in(DEMO)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def is_loaded(tokenizer: Any) -> bool:
    assert type(tokenizer) is BundledTokenizer
    return "_loaded" in vars(tokenizer)


@pytest.mark.slow
def test_no_text_needs_transformers():
    code = """
import sys, hooked_lm
model = hooked_lm.HookedTransformer.from_pretrained("demo")
tokens = model.to_tokens(["Mary went", "Hello"])
model(tokens), model.to_string(tokens), model.to_str_tokens("Mary went"), model.generate("Mary", 2, verbose=False)
print([name for name in ("transformers", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_config_is_that_of_transformers():
    source = find("demo")
    ours, other = (from_source(source, Options(), by_transformers=by) for by in (False, True))
    assert isinstance(ours.config, BundledConfig)
    assert not isinstance(other.config, BundledConfig)
    assert ours.family is other.family
    assert read_config(ours.family, ours.config) == read_config(other.family, other.config)
    fields, expected = ours.config.to_dict(), other.config.to_dict()
    del fields["transformers_version"]
    assert {name: expected[name] for name in fields} == fields
    assert (ours.architectures, ours.config.initializer_range) == (other.architectures, other.config.initializer_range)
    flat = [
        each.flat_config(HookedTransformer.config_class, read_config(each.family, each.config), {})
        for each in (ours, other)
    ]
    assert flat[0] == flat[1]


def test_a_field_that_is_given_is_read_by_transformers():
    source = find("demo")
    assert not isinstance(from_source(source, Options(hf_kwargs={"n_inner": 512})).config, BundledConfig)


def test_text_is_that_of_transformers(lazy: Any, theirs: Any):
    assert ids_of(lazy, TEXTS, specials=True) == ids_of(theirs, TEXTS, specials=True)
    ours, others = (Tokens(each, True, "left", n_ctx=128, d_vocab=1506) for each in (lazy, theirs))
    assert ours.to_str_tokens(TEXTS) == others.to_str_tokens(TEXTS)
    assert ours.to_string(ours.to_tokens(TEXTS)) == others.to_string(others.to_tokens(TEXTS))
    assert [*map(ours.to_single_str_token, range(1506))] == [*map(others.to_single_str_token, range(1506))]
    assert prepends_bos(lazy) == prepends_bos(theirs)
    for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": False}):
        for ids in ([0, 305, 11, 220], torch.tensor([0, 305, 11, 220]), []):
            assert tokenizer_in(DEMO).decode(ids, **options) == theirs.decode(ids, **options)


def test_what_is_known_is_as_in_transformers(lazy: Any, theirs: Any):
    known = {name: value for name, value in vars(lazy).items() if name not in ("_load", "backend_tokenizer")}
    assert known == {name: getattr(theirs, name) for name in known}
    assert len(known) == 11
    assert len(lazy) == len(theirs)
    assert lazy.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert not is_loaded(lazy)


def test_all_else_is_that_of_the_tokenizer(lazy: Any, theirs: Any):
    assert isinstance(lazy, PreTrainedTokenizerFast)
    assert is_loaded(lazy)
    assert lazy(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert repr(lazy) == repr(theirs)
    assert lazy.all_special_ids == theirs.all_special_ids


def test_what_is_set_holds(lazy: Any):
    lazy.pad_token = "Mary"
    assert lazy.pad_token_id == lazy.convert_tokens_to_ids("Mary") is not None
    lazy.padding_side = "left"
    assert (lazy.padding_side, lazy._loaded.padding_side) == ("left", "left")
    assert lazy.add_tokens(["<new>"]) == 1
    assert (len(lazy), lazy.decode([1506])) == (1507, "<new>")


def test_the_model_notices_a_side_that_is_set():
    model = HookedTransformer.from_pretrained("demo")
    assert model.padding_side == "right"
    model.tokenizer.padding_side = "left"
    assert model.padding_side == "left"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.every_parameter
def test_copies_are_tokenizers_of_transformers(copied: Any, lazy: Any, theirs: Any):
    assert type(copied(lazy)) is type(theirs)
    assert copied(lazy)(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]


def test_that_of_another_folder_is_of_transformers(tmp_path: Path, theirs: Any):
    theirs.save_pretrained(tmp_path)
    assert type(tokenizer_in(tmp_path)) is type(theirs)
