from typing import Any

import numpy as np
import pytest
import torch

from hooked_lm import utils
from hooked_lm.factored_matrix import FactoredMatrix
from tests.close import assert_close
from tests.models.toys import ids, toy, words


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2])])
def test_to_numpy(value: Any) -> None:
    assert utils.to_numpy(value).tolist() == [1, 2]
    assert utils.to_numpy(3) == 3
    with pytest.raises(TypeError, match="dict"):
        utils.to_numpy({})


def test_shapes() -> None:
    x = torch.arange(24.0).view(1, 4, 6)
    assert torch.equal(utils.get_corner(x, 2), x[:2, :2, :2])
    assert utils.remove_batch_dim(x).shape == (4, 6)
    assert utils.remove_batch_dim(x.expand(2, -1, -1)).shape == (2, 4, 6)
    repeated = utils.repeat_along_head_dimension(x, 3)
    assert torch.equal(repeated, x[:, :, None].expand(1, 4, 3, 6))
    assert repeated.data_ptr() != x.data_ptr() == utils.repeat_along_head_dimension(x, 3, False).data_ptr()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert utils.get_offset_position_ids(1, mask).tolist() == [[0, 1, 2], [1, 2, 3]]


def test_composition_scores_of_every_pair() -> None:
    left = FactoredMatrix(torch.randn(2, 5, 3), torch.randn(2, 3, 5))
    right = FactoredMatrix(torch.randn(4, 5, 3), torch.randn(4, 3, 5))
    scores = utils.composition_scores(left, right)
    assert scores.shape == (2, 4)
    one, other = left.AB[1], right.AB[2]
    assert_close(scores[1, 2], (one @ other).norm() / one.norm() / other.norm())
    same = utils.composition_scores(left, FactoredMatrix(right.A[:2], right.B[:2]), broadcast_dims=False)
    assert_close(same, scores[[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="inner sizes"):
        utils.composition_scores(left, FactoredMatrix(torch.randn(4, 3), torch.randn(3, 4)))


def test_masks_and_bos() -> None:
    tokenizer = words()
    for side, mask in {"left": [[0, 1, 1], [1, 1, 1]], "right": [[1, 1, 0], [1, 1, 1]]}.items():
        tokens = torch.tensor([[0, 0, 5], [0, 4, 5]] if side == "left" else [[0, 5, 0], [0, 4, 5]])
        assert utils.get_attention_mask(tokenizer, tokens, True, side).tolist() == mask
        bare = utils.get_tokens_with_bos_removed(tokenizer, tokens, side)
        assert bare.tolist() == ([[0, 5], [4, 5]] if side == "left" else [[5, 0], [4, 5]])


def test_defaults_are_overridden_for_a_while_and_the_tokenizer_is_left_alone() -> None:
    model = toy("standard", words())
    side = model.tokenizer.padding_side
    with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert model.to_tokens(["w3 w4", "w5"]).tolist() == [[3, 4], [0, 5]]
        assert model.tokenizer.padding_side == side
    with pytest.raises(RuntimeError), utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side=None):
        raise RuntimeError
    assert model.to_tokens(["w3 w4", "w5"]).tolist() == [[0, 3, 4], [0, 5, 0]]
    with pytest.raises(ValueError, match="prepend_bos and padding_side"):
        utils.LocallyOverridenDefaults(model, padding="left")
    with pytest.raises(ValueError, match="'middle'"):
        utils.LocallyOverridenDefaults(model, padding_side="middle")


@pytest.mark.parametrize("dicts", [True, False])
def test_texts_become_rows(dicts: bool) -> None:
    texts = ["w3 w4 w5", "", "w6 w7"]
    rows = utils.tokenize_and_concatenate([{"text": t} for t in texts] if dicts else texts, words(), max_length=4)
    assert [row["tokens"].tolist() for row in rows] == [[0, 3, 4, 5], [0, 0, 0, 6]]
    rows = utils.tokenize_and_concatenate(texts, words(), max_length=9, add_bos_token=False)
    assert [row["tokens"].tolist() for row in rows] == [[3, 4, 5, 0, 0, 6, 7, 0, 0]]
    assert utils.tokenize_and_concatenate([], words()) == []
    tokenizer = words()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="EOS"):
        utils.tokenize_and_concatenate(texts, tokenizer)


def test_test_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    model = toy("standard", words())
    order = model("w3 w4")[0, -1].argsort(descending=True).tolist()
    answer = next(token for token in order if token > 2)
    utils.test_prompt("w3 w4", f"w{answer}", model, top_k=3)
    shown = capsys.readouterr().out
    assert f"Ranks of the answer tokens: [('w{answer}', {order.index(answer)})]" in shown
    assert shown.count("Top ") == 3
    utils.test_prompt("w3 w4", [f"w{answer}", "w9"], model, print_details=False)
    assert f"('w9', {order.index(9)})" in capsys.readouterr().out
    utils.test_prompt("w3 w4", "w9 w10", model, print_details=False)
    second = model("w3 w4 w9")[0, -1].argsort(descending=True).tolist().index(10)
    assert f"[('w9', {order.index(9)}), ('w10', {second})]" in capsys.readouterr().out


def test_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_cuda, has_mps, allowed, expected in (
        (True, True, "1", "cuda"),
        (False, True, "1", "mps"),
        (False, True, "0", "cpu"),
        (False, False, "1", "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda has_mps=has_mps: has_mps)
        monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", allowed)
        assert utils.get_device() == expected


def test_what_is_known_elsewhere_is_here_too() -> None:
    model, x = toy(), torch.randn(5)
    assert utils.get_act_name("z", 2) == "blocks.2.attn.hook_z"
    assert torch.equal(utils.gelu_new(x), utils.gelu_fast(x))
    assert 0 <= utils.lm_accuracy(model(ids()), ids()) <= 1
    assert all(hasattr(utils, name) for name in utils.__all__)
