"""Configs that nobody thought of: drawn at random, accepted by transformers, compared in answers and gradients.

Each day has another seed, which pytest prints. `pytest --seed 7 --draws 50 tests/families/test_random_configs.py` draws fifty
configs of each family, of the seeds 7 to 56; without `--draws` the core families have one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from tests.core import CORE, marks, thinned
from tests.families import Case
from tests.families._answers import assert_same_answers
from tests.families._case import YARN_MSCALE
from tests.families._models import hooked
from tests.families.flips import ignored
from tests.families.random_configs import draw, drawn, families, fields_read, lines, without_effect

YARN_OF_LAYERS = {
    kind: YARN_MSCALE["rope_parameters"] | {"mscale": None, "mscale_all_dim": None}
    for kind in ("full_attention", "sliding_attention")
}
T5GEMMA2 = lines("t5gemma2")[0].fields["decoder"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    draws = metafunc.config.option.draws
    if "nth" in metafunc.fixturenames:
        metafunc.parametrize("nth", range(draws or 1))
    if "name" in metafunc.fixturenames and not metafunc.definition.get_closest_marker("parametrize"):
        names = [name for name in families() if draws or name in CORE]
        metafunc.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


def test_a_config_drawn_at_random(name: str, nth: int, request: pytest.FixtureRequest):
    seed = request.config.option.seed + nth
    case = drawn(name, seed)
    try:
        assert_same_answers(case)
    except Exception as error:
        again = f"pytest --seed {seed} 'tests/families/test_random_configs.py' -k 'drawn_at_random and {name}'"
        text = f"{case.auto}, a prompt of {case.n_prompt}, {case.fields}: {error}\nagain: {again}"
        raise AssertionError(text) from error


@pytest.mark.slow
def test_every_field_that_a_family_reads_is_varied(name: str):
    """With an effect on our model, in a config that both sides accept; or `FIXED` says why not, or we refuse what it says."""
    assert without_effect(name) == []


@pytest.mark.slow
def test_a_field_that_a_family_does_not_read_moves_nothing_in_transformers(name: str):
    """Or it is refused by its name, or what it repeats is read."""
    assert ignored(name) == []


@pytest.mark.slow
def test_a_field_that_a_family_ignores_is_found(monkeypatch: pytest.MonkeyPatch):
    right = family("llama").config
    hooked.cache_clear()
    fields_read.cache_clear()
    monkeypatch.setattr(family("llama"), "config", lambda hf: right(HFConfig({**hf._values, "hidden_act": "silu"}, {})))
    monkeypatch.setattr(family("llama"), "NO_EFFECT", ("*",), raising=False)
    assert ignored("llama") == ["hidden_act"]
    hooked.cache_clear()
    fields_read.cache_clear()


# ---- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "deberta-v2", "t5"])
def test_draws_are_new_and_repeat(name: str):
    configs = [drawn(name, seed).fields for seed in range(4)]
    assert configs == [drawn(name, seed).fields for seed in range(4)]
    known = [case.fields for case in lines(name)]
    assert all(config not in known and configs.count(config) == 1 for config in configs)


@pytest.mark.slow
def test_every_class_of_a_family_is_drawn():
    ends = ("MaskedLM", "PreTraining", "NextSentencePrediction", "SequenceClassification", "TokenClassification")
    assert {drawn("bert", seed).auto for seed in range(60)} >= {"AutoModel", *(f"AutoModelFor{end}" for end in ends)}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deberta-v2", {"relative_attention": False, "norm_rel_ebd": "layer_norm"}, "norm_rel_ebd"),
        ("deberta", {"pos_att_type": ["c2p", "c2p"]}, "names a kind twice"),
        ("bert", {"embedding_size": 12}, "embedding_size"),
        ("distilbert", {"embedding_size": 12}, "embedding_size"),
        ("deepseek_v2", {"n_group": 3, "topk_method": "group_limited_greedy"}, "8 experts cannot form 3 groups"),
        ("deepseek_v4", {"hc_sinkhorn_iters": 0}, "n_iterations=0"),
        ("dots1", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        *(
            (name, {"rope_parameters": YARN_OF_LAYERS}, "ignores truncate=False")
            for name in ("gemma3_text", "mellum", "olmo3")
        ),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("glm4v_text", {"head_dim": 16}, "head_dim=16"),
        *(
            (name, {"head_dim": 2}, "head_dim=2")
            for name in ("axk1", "deepseek_v3", "longcat_flash", "mistral4", "youtu")
        ),
        ("zamba2", {"hybrid_layer_ids": [4, 3, 1]}, r"hybrid_layer_ids=\[4, 3, 1\]"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 2}, "cannot form 8 groups of one size with at least 2 each"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "5 of 4 groups of experts"),
        ("recurrent_gemma", {"block_types": ["recurrent", "full_attention"]}, r"block_types \['full_attention'\]"),
        ("t5gemma2", {"decoder": T5GEMMA2 | {"use_bidirectional_attention": True}}, "use_bidirectional_attention=True"),
        ("gemma3n_text", {"use_bidirectional_attention": True}, "ignores use_bidirectional_attention=True"),
    ],
)
def test_what_draws_have_found_is_refused_by_name(name: str, fields: dict[str, Any], message: str):
    """A norm that nothing passes, a width that transformers overlooks, groups that it mixes, ..."""
    line = lines(name)[0]
    with pytest.raises(ValueError, match=message):
        hooked(replace(line, name="refused", fields={**line.fields, **fields}))


def test_a_field_that_a_family_reads_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    before, right = without_effect("llama", seeds=6), family("llama").config
    hooked.cache_clear()
    monkeypatch.setattr(family("llama"), "config", lambda hf: silu(right(hf)))
    assert {*without_effect("llama", seeds=6)} - {*before} == {"hidden_act"}
    hooked.cache_clear()


# ---- the comparison can fail -------------------------------------------------------------------------------------------


def silu(tree: Any) -> Any:
    """What overlooks LLaMA's `hidden_act`."""
    return replace(tree, blocks=tuple(replace(b, mlp=replace(b.mlp, act_fn="silu")) for b in tree.blocks))


def one_activation_of_heads(tree: Any) -> Any:
    """What overlooks ModernBERT's `classifier_activation`."""
    heads = {
        "mlm_head": tree.mlm_head and replace(tree.mlm_head, act_fn="gelu"),
        "pooler": tree.pooler and replace(tree.pooler, act_fn="gelu"),
    }
    if tree.token_classifier is not None:
        transform = replace(tree.token_classifier.transform, act_fn="gelu")
        heads["token_classifier"] = replace(tree.token_classifier, transform=transform)
    return replace(tree, **heads)


def one_eps(tree: Any) -> Any:
    """What overlooks T5's `layer_norm_epsilon`."""
    norm = RMSNorm.Config(tree.embed.d_model, 0.05)
    sides = {
        side: replace(
            stack,
            ln_final=norm,
            blocks=tuple(
                replace(block, **{name: norm for name in ("ln1", "ln2", "ln3") if hasattr(block, name)})
                for block in stack.blocks
            ),
        )
        for side, stack in (("encoder", tree.encoder), ("decoder", tree.decoder))
    }
    return replace(tree, **sides)


MISREAD = [
    ("llama", "hidden_act", silu),
    ("modernbert", "classifier_activation", one_activation_of_heads),
    ("t5", "layer_norm_epsilon", one_eps),
]


@pytest.mark.parametrize(("name", "field", "misread"), thinned(MISREAD, keep=MISREAD[:1]))
def test_a_family_that_misreads_a_field_is_noticed(
    name: str, field: str, misread: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
):
    """The draws notice it, and only by that field; the lines of the table, all of which have the same value, do not."""
    assert len({case.fields.get(field) for case in lines(name)}) == 1
    draws = [draw(name, seed) for seed in range(8)]
    right = family(name).config

    def wrong(hf: HFConfig) -> Any:
        return misread(right(hf))

    def is_noticed(case: Case) -> bool:
        try:
            assert_same_answers(case)
        except AssertionError as error:
            return "are not close" in str(error) or "logits differ" in str(error)  # the numbers, and nothing else
        return False

    hooked.cache_clear()
    monkeypatch.setattr(family(name), "config", wrong)
    noticed = [found.changes for found in draws if is_noticed(found.case)]
    hooked.cache_clear()
    assert noticed
    assert all((field,) in changes for changes in noticed)
