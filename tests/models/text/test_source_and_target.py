"""Sources with their targets as one value: an encoder-decoder runs it as it runs both."""

import pytest
import torch

from hooked_lm import HookedEncoderDecoder
from hooked_lm.models.text.source_and_target import SourceAndTarget

SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 24, "d_vocab": 20, "act_fn": "relu"}
MODEL = HookedEncoderDecoder({**SIZES, "decoder_start_token_id": 0, "initializer_range": 0.5, "seed": 0})
SOURCE, TARGET = torch.tensor([[5, 3, 9, 4], [7, 7, 2, 8]]), torch.tensor([[0, 7, 4], [0, 2, 2]])
ROWS = SourceAndTarget(SOURCE, TARGET)


def test_a_model_runs_both() -> None:
    both = MODEL(SOURCE, TARGET)
    assert torch.equal(MODEL(ROWS), both)
    assert torch.equal(MODEL(ROWS.to("cpu").repeated(2))[2:], MODEL(SOURCE.repeat(2, 1), TARGET.repeat(2, 1))[2:])
    assert torch.equal(MODEL(ROWS[1:]), MODEL(SOURCE[1:], TARGET[1:]))
    assert torch.equal(MODEL(ROWS, return_type="loss"), MODEL(SOURCE, TARGET, return_type="loss"))
    _, cache = MODEL.run_with_cache(ROWS)
    assert cache["encoder.0.hook_resid_post"].shape == (2, 4, 16)


def test_a_second_target_is_refused() -> None:
    with pytest.raises(ValueError, match="a SourceAndTarget has its target: leave decoder_input out"):
        MODEL(ROWS, TARGET)


def test_it_counts_rows_and_the_tokens_of_both() -> None:
    assert (len(ROWS), ROWS.shape, ROWS[:1].shape) == (2, (2, 7), (1, 7))
    assert torch.equal(ROWS.tokens, torch.cat([SOURCE, TARGET], 1))


@pytest.mark.parametrize(
    ("site", "tokens"),
    [
        ("encoder.0.attn.hook_k", SOURCE),
        ("hook_encoder_out", SOURCE),
        ("decoder.0.attn.hook_k", TARGET),
        ("decoder.0.cross_attn.hook_q", TARGET),
        ("decoder.0.cross_attn.hook_k", SOURCE),
    ],
)
def test_the_tokens_at_the_positions_of_a_site(site: str, tokens: torch.Tensor) -> None:
    assert torch.equal(ROWS.tokens_at(MODEL.hook_dict[site]), tokens)
