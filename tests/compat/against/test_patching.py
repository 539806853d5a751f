"""Every sweep of activation patching, the head detector and the singular vectors of weights, in both libraries."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from originals import TOYS, assert_close, demo, distance, hf_model, original, pair, transformer_lens
from torch import Tensor

import hooked_lm
from hooked_lm import pretrained
from hooked_lm.analysis.reading import head_detector
from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter

OURS, THEIRS = hooked_lm.patching, transformer_lens.patching
SWEEPS = sorted(name for name in dir(THEIRS) if name.startswith("get_act_patch_"))
ATTN_ONLY = [name for name in TOYS if name != "toy-solu"]
SWEPT = ["gpt2", "neox", "llama", "gemma2", "mixtral", "toy-ln", "toy-shortformer"]
GROUPED = ("llama", "gemma2", "mixtral")
HALF_A_THOUSANDTH = 0.00051  # theirs is rounded to three places
CLEAN, CORRUPTED = torch.tensor([[5, 9, 12, 7, 30]]), torch.tensor([[5, 9, 44, 7, 30]])


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 7] - 0.5 * logits[0, -2, 8]


@cache
def cached(name: str) -> tuple[Any, Any]:
    """What ours and theirs kept of the clean run."""
    with torch.no_grad():
        ours, theirs = (model.run_with_cache(CLEAN)[1] for model in pair(name).both)
    return ours, theirs


@cache
def logits(name: str) -> Tensor:
    """Those of the corrupted run."""
    with torch.no_grad():
        return pair(name).ours(CORRUPTED)


def swept(name: str, sweep: str, **options: Any) -> list[Any]:
    """The result of ours and of theirs."""
    found = []
    for library, model, store in zip((OURS, THEIRS), pair(name).both, cached(name), strict=True):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(getattr(library, sweep)(model, CORRUPTED, store, metric, **options))
    return found


def has_sites(name: str, sweep: str) -> bool:
    """Whether a model has the sites of a sweep."""
    if name in ATTN_ONLY:
        return not sweep.endswith(("resid_mid", "mlp_out", "block_every"))
    return name != "neox" or not sweep.endswith("resid_mid")


def test_the_lists_of_sweeps_are_the_same():
    assert set(SWEEPS) <= set(dir(OURS))
    assert len(SWEEPS) == 18


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("name", SWEPT)
def test_every_sweep(name: str, sweep: str):
    """Where keys and values are grouped there are fewer of their heads: beside the other parts theirs fills the places of those
    that are missing with 0, which looks like a result, ours with NaN."""
    if not has_sites(name, sweep):
        for library, model, store in zip((OURS, THEIRS), pair(name).both, cached(name), strict=True):
            with pytest.raises(KeyError):
                getattr(library, sweep)(model, CORRUPTED, store, metric)
        return
    ours, theirs = swept(name, sweep)
    filled = name in GROUPED and sweep.endswith(("head_all_pos_every", "head_by_pos_every"))
    assert ours.isnan().any() == filled
    assert_close(ours.nan_to_num(0.0), theirs, scale=logits(name))
    assert theirs.std() > 0.01, "no patch did anything"


INDICES = {
    "layer_pos": [1, 2],
    "layer_pos_head_vector": [1, 2, 3],
    "layer_head_vector": [1, 2],
    "layer_head_pattern": [1, 2],
    "layer_head_pos_pattern": [1, 2, 3],
    "layer_head_dest_src_pos_pattern": [1, 2, 3, 1],
}


@pytest.mark.parametrize(("setter", "index"), INDICES.items())
def test_patch_setters(setter: str, index: list[int]):
    generator = torch.Generator().manual_seed(8)
    shape = (1, 4, 5, 5) if "pattern" in setter else (1, 5, 4, 8)
    corrupted, clean = (torch.randn(shape, generator=generator) for _ in range(2))
    ours, theirs = (getattr(lib, setter + "_patch_setter")(corrupted.clone(), index, clean) for lib in (OURS, THEIRS))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, corrupted)


def test_a_sweep_of_ones_own():
    """By axes, by a table, with the table; and a setter of one's own."""

    def halfway(corrupted: Tensor, index: Any, clean: Tensor) -> Tensor:
        corrupted[:, index[1]] = (corrupted[:, index[1]] + clean[:, index[1]]) / 2
        return corrupted

    ours, theirs = swept(
        "gpt2",
        "generic_activation_patch",
        patch_setter=halfway,
        activation_name="mlp_out",
        index_axis_names=("layer", "pos"),
    )
    assert_close(ours, theirs)
    table = OURS.make_df_from_ranges((2, 5), ("layer", "pos"))
    assert table.equals(THEIRS.make_df_from_ranges((2, 5), ("layer", "pos")))
    row, their_row = swept(
        "gpt2", "generic_activation_patch", patch_setter=halfway, activation_name="mlp_out", index_df=table
    )
    assert_close(row, their_row)
    assert_close(row, ours.flatten())
    (ours, own), (theirs, their) = swept("gpt2", "get_act_patch_resid_pre", return_index_df=True)
    assert_close(ours, theirs)
    assert own.equals(their)


# ---- heads and directions --------------------------------------------------------------------------------------------

TEXT = "When Mary and John went to the store, John gave a drink to Mary. When Mary and John went"
THEIR_DETECTOR = transformer_lens.head_detector


@pytest.mark.parametrize("kind", ["previous_token_head", "duplicate_token_head", "induction_head"])
def test_head_detector(kind: str):
    both = demo()
    tokens = both.ours.to_tokens(TEXT)
    maker = f"get_{kind}_detection_pattern"
    assert_close(getattr(head_detector, maker)(tokens).float(), getattr(THEIR_DETECTOR, maker)(tokens).float())
    for options in (
        {},
        {"exclude_bos": True},
        {"exclude_current_token": True},
        {"error_measure": "abs"},
        {"error_measure": "abs", "exclude_bos": True, "exclude_current_token": True},
        {"heads": [(0, 1), (2, 3)]},
        {"heads": {1: [0, 7], 3: [2]}},
    ):
        ours = head_detector.detect_head(both.ours, TEXT, kind, **options)
        theirs = THEIR_DETECTOR.detect_head(both.theirs, TEXT, kind, **options)
        if options.get("error_measure") == "abs":
            assert (ours - theirs).abs().max() < HALF_A_THOUSANDTH, options
        else:
            assert_close(ours, theirs, options, scale=1.0)  # shares of attention
        assert ours.max() > 0 or "abs" in options.values()
    ours = head_detector.detect_head(both.ours, [TEXT, TEXT[:40]], kind)
    assert_close(ours, THEIR_DETECTOR.detect_head(both.theirs, [TEXT, TEXT[:40]], kind), scale=1.0)


def test_head_detector_with_a_pattern_and_a_cache():
    both = demo()
    n_pos = both.ours.to_tokens(TEXT).shape[1]
    pattern = torch.eye(n_pos)
    found = []
    for detector, model in zip((head_detector, THEIR_DETECTOR), both.both, strict=True):
        _, store = model.run_with_cache(TEXT, remove_batch_dim=True)
        found.append(detector.detect_head(model, TEXT, pattern, cache=store))
        options = {"exclude_bos": True, "exclude_current_token": False, "error_measure": "mul"}
        found.append(detector.compute_head_attention_similarity_score(store["pattern", 0][3], pattern, **options))
    assert_close(found[0], found[2], scale=1.0)
    assert_close(torch.tensor(found[1]), torch.tensor(float(found[3])), scale=1.0)


def singular_vectors(models: tuple[Any, Any], kind: str) -> tuple[Tensor, Tensor]:
    """What the first directions do to the logits, up to the sign of each."""
    options: dict[str, Any] = {"num_vectors": 4, "head_index": 2 if kind == "OV" else None}
    classes = (SVDInterpreter, transformer_lens.SVDInterpreter)
    ours, theirs = (
        cls(model).get_singular_vectors(kind, 1, **options).abs() for cls, model in zip(classes, models, strict=True)
    )
    return ours, theirs


@pytest.mark.parametrize("kind", ["OV", "w_in", "w_out"])
def test_singular_vectors(kind: str):
    """Of a model whose norms are folded into its weights they are the same. Of one that is not, theirs leaves the final norm's
    weight out (and the first's, before heads): the directions do something else to the logits than in the folded model, though
    both models compute the same. Ours are those of the folded model."""
    weights = dict.fromkeys(("fold_ln", "center_writing_weights"), True)
    folded = (
        pretrained.from_pretrained_no_processing("tiny", hf_model=hf_model("gpt2"), **weights),
        original("gpt2", **weights),
    )
    expected, theirs = singular_vectors(folded, kind)
    assert_close(expected, theirs)
    centred = dict.fromkeys(("center_writing_weights",), True)
    unfolded = (
        pretrained.from_pretrained_no_processing("tiny", hf_model=hf_model("gpt2"), **centred),
        original("gpt2", **centred),
    )
    ours, theirs = singular_vectors(unfolded, kind)
    assert_close(ours, expected)
    assert distance(theirs, expected) > 0.01
