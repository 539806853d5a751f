"""Values on a device are checked there, for which nobody waits; those given on the host are checked before they are copied.

A model without values (meta) stands for one on a GPU.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.readable import check
from hooked_lm.models.checks import check_rows
from tests.models.toys import toy


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the device is asked to check."""
    found: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, message: found.append(message))
    return found


def test_checks_raise_on_the_host_and_are_left_to_a_device(messages: list[str]):
    check(torch.tensor(True), "wrong")
    with pytest.raises(ValueError, match="of the values"):
        check(torch.tensor(False), "wrong", lambda: "of the values")
    assert messages == []
    check(torch.tensor(False, device="meta"), "wrong", lambda: "of the values")
    assert messages == ["wrong"]


def on_meta() -> HookedTransformer:
    return toy("standard").to("meta")


def test_ids_are_checked_where_they_are(messages: list[str]):
    model = on_meta()
    with pytest.raises(ValueError, match=r"token id 1000 at \[0, 1\]"):
        model(torch.tensor([[1, 1000]]))
    assert messages == []
    model(torch.zeros(1, 2, dtype=torch.long, device="meta"))
    [message] = messages
    assert message.startswith("a token id is out of range: d_vocab is")


def test_masks_are_checked_where_they_are(messages: list[str]):
    model, ids = on_meta(), torch.zeros(1, 2, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="an attention mask is 1 for real tokens"):
        model(ids, attention_mask=torch.tensor([[2, 1]]))
    check_rows(torch.ones(1, 2, dtype=torch.bool, device="meta"))
    model(ids, attention_mask=torch.ones_like(ids))
    assert [message[:12] for message in messages] == [
        "a row is all",
        "an attention",
        "a token id i",
    ]


def test_a_mask_of_the_host_without_padding_is_none():
    """So attention on the device needs no mask."""
    model, ids = on_meta(), torch.zeros(1, 2, dtype=torch.long, device="meta")
    real = model.stack.real

    def of(mask: Tensor) -> Tensor | None:
        return real(model, mask, ids)

    assert of(torch.ones(1, 2)) is None
    padded = of(torch.tensor([[0, 1]]))
    assert padded is not None
    assert padded.is_meta
    assert of(torch.ones_like(ids)) is not None
