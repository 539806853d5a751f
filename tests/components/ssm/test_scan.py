import torch
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm.components.ssm.scan import linear_scan, step_by_step
from tests.close import assert_close


@given(n_pos=st.integers(1, 60), started=st.booleans(), shared_decay=st.booleans())
def test_pieces_are_steps(n_pos: int, started: bool, shared_decay: bool) -> None:
    generator = torch.Generator().manual_seed(n_pos)
    update = torch.randn(2, n_pos, 3, 4, generator=generator, dtype=torch.float64)
    decay = torch.rand(2, n_pos, 3, 1 if shared_decay else 4, generator=generator, dtype=torch.float64)
    decay[:, ::5] = 0.0
    start = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) if started else None
    assert_close(linear_scan(decay, update, start), step_by_step(decay, update, start))


def test_steps_are_the_definition() -> None:
    decay, update = torch.tensor([[0.5, 0.25, 0.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert step_by_step(decay, update, torch.tensor([8.0])).tolist() == [[5.0, 3.25, 3.0, 7.0]]
    assert step_by_step(decay, update).tolist() == [[1.0, 2.25, 3.0, 7.0]]
