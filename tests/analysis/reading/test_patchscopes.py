"""A state put into another prompt does what the same edit does in plain forward passes, token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading import continuations
from hooked_lm.analysis.reading.patchscopes import IDENTITY_PROMPT, Patchscope, patchscope
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, toy

FIRST = {case.family: case for case in reversed(DECODER_CASES)}
FRANCE, SPAIN = "The capital of France is", "The capital of Spain is"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@torch.no_grad()
def without_a_cache(model: Any, target: Tensor, position: int, site: str, state: Tensor, n: int) -> list[int]:
    """Everything is read again for each token, the state put in each time."""

    def put(value: Tensor, hook: Any) -> None:
        value[:, position] = state

    for _ in range(n):
        logits = model.run_with_hooks(target, fwd_hooks=[(site, put)])
        target = torch.cat([target, logits[:, -1:].argmax(-1)], 1)
    return target[0, -n:].tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gptj", "mixtral", "mamba"])
@pytest.mark.parametrize("length", [6, 1])  # a prompt of one token looks like the ones that follow
def test_a_grid_is_plain_forward_passes(family: str, length: int, monkeypatch: pytest.MonkeyPatch):
    model, tokens = hooked(FIRST[family]), prompt(FIRST[family], batch=2, length=6)
    source, target = tokens[:1], tokens[1:, :length]
    monkeypatch.setattr(continuations, "ROWS", 3)
    _, cache = model.run_with_cache(source)
    differ = set()
    for to in {length - 1, max(0, length - 3)}:
        places = {"source_positions": 3, "target_positions": to}
        found = patchscope(model, source, target, **places, target_layers="each", max_new_tokens=4)
        for i in range(model.cfg.n_layers):
            for j in range(model.cfg.n_layers):
                state = cache["resid_post", i][0, 3]
                expected = without_a_cache(model, target, to, f"blocks.{j}.hook_resid_post", state, 4)
                assert found.tokens[i, j].tolist() == expected
                differ.add(tuple(expected))
    own = model.generate(target, 4, do_sample=False, stop_at_eos=False, verbose=False, return_type="tokens")
    assert found.unpatched.tolist() == own[0, length:].tolist()
    assert differ != {tuple(found.unpatched.tolist())}  # the patch does something


@pytest.mark.parametrize("length", [6, 1])
def test_every_pass_is_patched_where_each_reads_the_prompt_again(length: int):
    """A bidirectional layer allows no key/value cache."""
    model, target = toy(attention_dir="bidirectional"), ids(1, length)
    source, site = ids(1, 6, seed=7), "blocks.1.hook_resid_post"
    state = model.run_with_cache(source, names_filter=site)[1][site][0, 2]
    expected = without_a_cache(model, target, length - 1, site, state, 6)
    places = {"source_positions": 2, "source_layers": [1], "target_layers": [1]}
    found = patchscope(model, source, target, **places, max_new_tokens=6)
    assert found.tokens[0, 0].tolist() == expected
    assert found.unpatched.tolist() != expected


def test_a_state_in_its_own_place_changes_nothing(model: HookedTransformer):
    found = patchscope(model, FRANCE, FRANCE, source_positions=2, target_positions=2, max_new_tokens=4)
    assert not found.to_dataframe()["changed"].any()
    assert len(set(found.to_dataframe()["text"])) == 1
    other = patchscope(model, SPAIN, FRANCE, source_positions=4, target_positions=4, max_new_tokens=4)
    assert other.to_dataframe()["changed"].any()  # another would


def test_the_planted_answer_is_said(model: HookedTransformer):
    """At the end of the last layer the state is the answer, whatever prompt it stands in."""
    for target in (SPAIN, IDENTITY_PROMPT):
        found = patchscope(model, FRANCE, target, source_layers=[-1], max_new_tokens=1)
        assert found.texts == [[" Paris"]]
    capital = patchscope(
        model, FRANCE, SPAIN, source_positions=4, target_positions=4, source_layers=[0], max_new_tokens=1
    )
    assert capital.texts == [[" Paris"]]  # the country at its place, early
    late = patchscope(model, FRANCE, SPAIN, source_positions=4, target_positions=4, source_layers=[3], max_new_tokens=1)
    assert late.texts == [[" Madrid"]]  # too late for anybody to read it


def test_another_model_reads_what_a_mapping_gives(model: HookedTransformer):
    case = FIRST["llama"]
    small, tokens = hooked(case), prompt(case, batch=1, length=5)
    d_model = small.cfg.d_model
    found = patchscope(
        model, FRANCE, tokens, source_layers=[0, 1], target_layers=[1], target_model=small, max_new_tokens=3,
        mapping=lambda states: states[:, :d_model] * 3,
    )  # fmt: skip
    _, cache = model.run_with_cache(FRANCE)
    for i in range(2):
        state = 3 * cache["resid_post", i][0, -1, :d_model]
        assert found.tokens[i, 0].tolist() == without_a_cache(small, tokens, 4, "blocks.1.hook_resid_post", state, 3)
    assert found.texts == [[None], [None]]  # it has no tokenizer
    with pytest.raises(ValueError, match=r"are \[1, 128\], the target model reads \[1, 32\]: give mapping"):
        patchscope(model, FRANCE, tokens, source_layers=[0], target_model=small)
    with pytest.raises(ValueError, match="the mapping gave another width"):
        patchscope(model, FRANCE, tokens, source_layers=[0], target_model=small, mapping=lambda states: states[:, :5])
    with pytest.raises(IndexError, match="no layer 3: give target_layers"):
        patchscope(model, FRANCE, tokens, target_model=small, mapping=lambda states: states[:, :d_model])


def test_tables_figures_files(model: HookedTransformer, tmp_path: Path):
    found = patchscope(model, FRANCE, SPAIN, target_layers=[0, -1], max_new_tokens=2)
    table = found.to_dataframe()
    assert table[["source_layer", "target_layer"]].values.tolist()[:3] == [[0, 0], [0, 3], [1, 0]]
    assert table["first"].iloc[-1] == " Paris"
    assert found.plot().data[0].text[0][1] == "·Paris"
    found.save(tmp_path / "found.safetensors")
    again = Patchscope.load(tmp_path / "found.safetensors")
    assert again.to_dataframe().equals(table)
    assert (again.about, again.target_layers) == (found.about, (0, 3))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"source_positions": 6}, IndexError, "source position 6 is out of range"),
        ({"target_positions": -7}, IndexError, "target position -7 is out of range"),
        ({"source_layers": [4]}, IndexError, "source layer 4 is out of range"),
        ({"target_layers": [4]}, IndexError, "target layer 4 is out of range"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": 10**6}, ValueError, "n_ctx"),
        ({"source_prompt": [FRANCE, SPAIN]}, ValueError, "one source prompt, got 2"),
        ({"source_prompt": []}, ValueError, "source prompt"),
        ({"site": "z"}, ValueError, "is not a residual stream"),
    ],
)
def test_what_is_wrong_is_said(model: HookedTransformer, options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        patchscope(model, **{"source_prompt": FRANCE, "target_prompt": SPAIN, **options})
    assert model.list_hooks() == {}
