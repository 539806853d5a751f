"""What is special about encoder-decoders with decoders of other kinds; `test_encoder_decoders.py` has what all have."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, patching
from tests.close import assert_apart, assert_close
from tests.families import Case, reference
from tests.families._models import hooked
from tests.families.other_encoder_decoders import CASES

EVEN = next(case for case in CASES if case.family == "t5gemma2")
SOURCE, OTHER = torch.tensor([[5, 3, 7, 4, 2], [7, 7, 2, 8, 6]]), torch.tensor([[5, 8, 9, 4, 3], [7, 1, 2, 8, 9]])
TARGET = torch.tensor([[3, 7, 4], [3, 2, 2]])
WHOLE = pytest.mark.filterwarnings("ignore:.*whole forward pass")


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def assert_sweep_is_exact(case: Case, name: str, site: str, positions: int) -> None:
    """Each cell of a sweep over positions (of the first axis of them) is a forward pass with the value of the other run."""
    model = hooked(case)
    grid = patching.sweep(
        model, SOURCE, OTHER, metric=metric, decoder_input=TARGET, sites=name, positions="each", progress=False
    )
    _, cache = model.run_with_cache(OTHER, TARGET)
    point = model.hook_dict[site.format(0)]
    axis = next(i for i, dim in enumerate(point.dims) if dim in ("pos", "query_pos") or (i == 1 and dim == "key_pos"))
    assert grid.values.shape[:-1].numel() == len(model.decoder) * positions
    for layer in range(len(model.decoder)):
        for pos in range(positions):
            where = (slice(None),) * axis + (pos,)

            def patch(value: Tensor, hook: Any, where: Any = where) -> Tensor:
                value[where] = cache[hook.name][where]
                return value

            expected = metric(model.run_with_hooks(SOURCE, TARGET, fwd_hooks=[(site.format(layer), patch)]))
            assert_close(grid.values.reshape(len(model.decoder), positions, -1)[layer, pos], expected)
    assert grid.effects().mean.abs().max() > 1e-3


# ---- one softmax over own keys and the encoder's ---------------------------------------------------------------------

MERGED = {
    "decoder.pattern": ("decoder.{}.attn.hook_pattern", 3),
    "decoder.cross_attn.pattern": ("decoder.{}.cross_attn.hook_pattern", 3),
    "decoder.cross_attn.v": ("decoder.{}.cross_attn.hook_v", 5),
    "decoder.cross_attn.z": ("decoder.{}.cross_attn.hook_z", 3),
}


@WHOLE
@pytest.mark.parametrize("name", MERGED)
@torch.no_grad()
def test_sweeps_of_the_halves_of_a_merged_attention(name: str) -> None:
    assert_sweep_is_exact(EVEN, name, *MERGED[name])


@torch.no_grad()
def test_rows_of_both_halves_sum_to_one() -> None:
    _, cache = hooked(EVEN).run_with_cache(SOURCE, TARGET)
    own, of_source = cache["decoder.pattern", 1], cache["decoder.pattern", 1, "cross_attn"]
    assert (own.shape, of_source.shape) == ((2, 4, 3, 3), (2, 4, 3, 5))
    assert_close(own.sum(-1) + of_source.sum(-1), torch.ones(2, 4, 3))
    assert (of_source.sum(-1) > 0.05).any()


@torch.no_grad()
def test_a_hidden_source_leaves_own_keys() -> None:
    """Scores of minus infinity in the columns of the source: nothing of it reaches the logits."""
    model = hooked(EVEN)

    def hide(scores: Tensor, hook: Any) -> Tensor:
        return torch.full_like(scores, float("-inf"))

    hidden = [("decoder.*.cross_attn.hook_attn_scores", hide)]
    assert_close(
        model.run_with_hooks(SOURCE, TARGET, fwd_hooks=hidden), model.run_with_hooks(OTHER, TARGET, fwd_hooks=hidden)
    )
    assert_apart(model(SOURCE, TARGET), model(OTHER, TARGET))


@torch.no_grad()
def test_norms_are_not_folded_into_weights_that_read_the_source_too() -> None:
    theirs = copy.deepcopy(reference(EVEN))
    folded = HookedEncoderDecoder.from_pretrained("tiny", hf_model=theirs)
    assert_close(folded(SOURCE, TARGET).log_softmax(-1), hooked(EVEN)(SOURCE, TARGET).log_softmax(-1))


@torch.no_grad()
def test_weights_of_the_source_are_those_of_own_keys() -> None:
    model = copy.deepcopy(hooked(EVEN))
    assert torch.equal(model.cross_W_V[1], model.W_V[3])
    model.decoder[1].attn.W_V.zero_()
    _, cache = model.run_with_cache(SOURCE, TARGET)
    assert (cache["decoder.1.cross_attn.hook_v"] == 0).all()
    assert (cache["decoder.0.cross_attn.hook_v"] != 0).any()


@torch.no_grad()
def test_the_end_of_an_image_has_a_vector_of_its_own() -> None:
    model = hooked(EVEN)
    embed = model.embed
    assert torch.equal(embed(torch.tensor([[7]]))[0, 0], embed.w_replaced)
    assert_close(model.W_E * embed.cfg.scale, embed(torch.arange(61)[None])[0])
    assert torch.equal(model.W_U, embed.W_E.T)
