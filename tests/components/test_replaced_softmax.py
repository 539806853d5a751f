"""A function that a tool puts in the place of `torch.nn.functional.softmax` computes the patterns of attention."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedVisionEncoder
from tests.close import assert_apart, assert_close
from tests.models.toys import KINDS, ids, toy

TOKENS = ids(batch=2, n_pos=9)
softmax, of_tensors = F.softmax, Tensor.softmax
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "act_fn": "gelu"}


class Flatter(torch.autograd.Function):
    """A softmax whose gradient is that of scores half as large, as gim-explain has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return of_tensors(x, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        pattern = of_tensors(x / 2, -1)
        return pattern * (gradient - (gradient * pattern).sum(-1, keepdim=True))


def half(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return of_tensors(x / 2, -1)


def by_function(patch: pytest.MonkeyPatch, fn: Callable[..., Tensor]) -> None:
    patch.setattr(F, "softmax", fn)


def by_method(patch: pytest.MonkeyPatch, fn: Callable[..., Tensor]) -> None:
    patch.setattr(Tensor, "softmax", fn)


@pytest.mark.parametrize("put", [by_function, by_method])
@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_the_patterns(kind: str, put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, in_steps = toy(kind), toy(kind, fused_attention="never")
    plain = model(TOKENS)
    with monkeypatch.context() as patch:
        put(patch, half)
        changed, pattern = model(TOKENS), model.run_with_cache(TOKENS)[1]["pattern", 0]
        assert_close(changed, in_steps(TOKENS))
        scores = model.run_with_cache(TOKENS)[1]["attn_scores", 0]
    assert_apart(changed, plain)
    if not model.cfg.use_attention_sinks:
        assert_close(pattern, (scores / 2).softmax(-1))
    assert torch.equal(model(TOKENS), plain)


def others() -> dict[str, tuple[Any, tuple[Tensor, ...]]]:
    text = {**SIZES, "n_ctx": 12, "d_vocab": 50}
    images = {**SIZES, "image_size": 8, "patch_size": 4, "n_classes": 3}
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seq2seq = HookedEncoderDecoder({**text, "act_fn": "relu", "decoder_start_token_id": 0})
    return {
        "encoder": (HookedEncoder(text), (TOKENS,)),
        "encoder-decoder": (seq2seq, (TOKENS, TOKENS[:, :4])),
        "vision": (HookedVisionEncoder(images), (pixels,)),
    }


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "vision"])
def test_in_models_of_other_kinds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = others()[kind]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".W_Q" in name or ".W_K" in name:
                weight.mul_(8)
        plain = model(*inputs)
        monkeypatch.setattr(F, "softmax", half)
        changed = model(*inputs)
        model.cfg.fused_attention = "never"
        assert_close(changed, model(*inputs))
    assert_apart(changed, plain)


def test_attention_that_is_called_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy("standard")
    attn, x = model.blocks[0].attn, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    plain = attn(x, x, x)
    monkeypatch.setattr(F, "softmax", half)
    assert_apart(attn(x, x, x), plain)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values stay, their gradients are those of the function; with recorders or without."""
    found = []
    for fused in ("auto", "never"):
        model = toy("standard", fused_attention=fused)
        with monkeypatch.context() as patch:
            patch.setattr(F, "softmax", lambda x, dim=-1, **_: Flatter.apply(x))
            model.requires_grad_(True)
            logits = model(TOKENS)
            logits[..., 7].sum().backward()
        assert_close(logits, model(TOKENS))
        found.append(model.W_E.grad)
        model.zero_grad()
        model(TOKENS)[..., 7].sum().backward()
        assert_apart(model.W_E.grad, found[-1])
    assert_close(*found)


def test_the_kernel_runs_while_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy("standard")
    assert model.blocks[0].attn.kernel() == model.blocks[0].attn.mix_fused
    monkeypatch.setattr(F, "softmax", half)
    assert model.blocks[0].attn.kernel() == model.blocks[0].attn.mix_in_steps
    monkeypatch.undo()
    assert model.blocks[0].attn.kernel() == model.blocks[0].attn.mix_fused


COMPILE = """
import torch
import torch.nn.functional as F
from tests.close import assert_apart, assert_close
from tests.models.toys import ids, toy
tokens, model, own = ids(batch=2, n_pos=9), toy("standard"), F.softmax
compiled, by_torch = model.compiled(backend="traced"), torch.compile(model, fullgraph=True, backend="eager")
with torch.no_grad():
    plain = model(tokens)
    assert_close(compiled(tokens), plain)
    assert_close(by_torch(tokens), plain)
    F.softmax = lambda x, dim: own(x / 2, dim)
    changed = model(tokens)
    assert_close(compiled(tokens), changed)
    F.softmax = own
    assert_close(compiled(tokens), plain)
    assert_apart(changed, plain)
print("noticed")
"""


@pytest.mark.slow
def test_compiled_models_notice_it() -> None:
    """In a separate process, because the runtime checks of annotations, which only tests have, do not compile."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "noticed", done.stderr
