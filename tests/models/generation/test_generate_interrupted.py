"""What generation leaves behind when it is interrupted, abandoned, or has nothing to draw from: an error, and no trace."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder
from hooked_lm.hooks import generation_step, scope
from hooked_lm.interventions import NanGuard
from hooked_lm.models.generation import decoder as decoder_generate
from hooked_lm.models.generation import encoder_decoder as encoder_decoder_generate
from hooked_lm.models.generation import loop
from hooked_lm.models.generation.sampling import sample_logits
from tests.interrupting import in_a_generator
from tests.models.toys import D_VOCAB, ids, toy

QUIET: dict[str, Any] = {"verbose": False, "stop_at_eos": False}
SITE = "blocks.0.hook_resid_post"
FILES = {module.__file__ for module in (decoder_generate, encoder_decoder_generate, loop, generation_step)}


def pair() -> HookedEncoderDecoder:
    cfg = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 16, "d_vocab": 12, "act_fn": "relu", "seed": 0}
    return HookedEncoderDecoder({**cfg, "decoder_start_token_id": 0, "device": "cpu"})


# ---- interrupts ----------------------------------------------------------------------------------------------------


def traced(run: Callable[[], object], interrupt_at: int | None = None) -> list[tuple[str, int]]:
    """The lines of the files that generate to which `run` came, until one of them was interrupted."""
    lines: list[tuple[str, int]] = []

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == interrupt_at:
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        in_a_generator(run)
    except KeyboardInterrupt:
        assert interrupt_at is not None
    finally:
        sys.settrace(before)
    return lines


def runs() -> dict[str, tuple[Any, Callable[[Any], object]]]:
    def recorded(model: Any) -> object:
        return model.generate(ids(1, 3), 2, return_cache=True, names_filter="hook_embed", **QUIET)

    def streamed(model: Any) -> object:
        return list(model.generate_stream(ids(1, 3), 2, 1, **QUIET))

    def written(model: Any) -> object:
        return model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, **QUIET)

    return {
        "recorded": (toy(n_layers=1), recorded),
        "streamed": (toy(n_layers=1), streamed),
        "written": (pair(), written),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grad_mode"), [("recorded", True), ("streamed", True), ("streamed", False), ("written", True)]
)
def test_an_interrupt_at_any_line_leaves_no_trace(kind: str, grad_mode: bool) -> None:
    model, run = runs()[kind]
    lines = traced(lambda: run(model))
    first = {line: n for n, line in reversed([*enumerate(lines, 1)])}
    last = {line: n for n, line in enumerate(lines, 1)}
    assert len(first) > 40
    with torch.set_grad_enabled(grad_mode):
        for n in sorted({*first.values(), *last.values()}):
            assert len(traced(lambda: run(model), n)) == n
            left = (torch.is_grad_enabled(), generation_step.current(), scope.current(), [*listeners(model)])
            assert left == (grad_mode, None, (), []), f"interrupted at {lines[n - 1]}, line event {n}"


def listeners(model: Any) -> Iterator[str]:
    return (name for name, point in model.all_points().items() if point.is_listening)


def test_an_interrupt_between_pieces_finds_the_callers_grad_mode() -> None:
    model = toy()
    stream = model.generate_stream(ids(1, 3), 6, 2, **QUIET)
    for mode in (True, False, True):
        with torch.set_grad_enabled(mode):
            next(stream)
            assert torch.is_grad_enabled() == mode
            assert generation_step.current() is None


def test_an_abandoned_stream_leaves_no_trace() -> None:
    model = toy()
    for close in (True, False):
        stream = model.generate_stream(ids(1, 3), 6, 2, **QUIET)
        next(stream)
        if close:
            stream.close()
        del stream
        assert torch.is_grad_enabled()
        assert generation_step.current() is None


def test_a_generation_inside_another_ones_hook_gives_the_reading_back() -> None:
    model, other, seen = toy(), toy("rotary"), []

    def ask(value: Tensor, hook: Any) -> None:
        other.generate(ids(1, 2), 1, **QUIET)
        seen.append((hook.step, hook.positions.tolist()))

    with model.hooks([(SITE, ask)]):
        model.generate(ids(1, 3), 2, **QUIET)
    assert seen == [(0, [0, 1, 2]), (1, [3])]


# ---- nothing to draw from ------------------------------------------------------------------------------------------


def spoil(step: int, row: int, value: float, every: bool = False) -> Callable[..., Tensor]:
    def put(logits: Tensor, hook: Any) -> Tensor:
        if hook.step == step:
            logits[row, -1, slice(None) if every else 7] = value
        return logits

    return put


@pytest.mark.parametrize("options", [{"do_sample": False}, {}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}])
@pytest.mark.parametrize(
    ("value", "every", "what"),
    [
        (float("nan"), False, "1 of 50 are NaN, the first is that of token 7"),
        (float("nan"), True, "50 of 50 are NaN, the first is that of token 0"),
        (float("inf"), False, "1 of 50 are inf, the first is that of token 7"),
        (float("-inf"), True, "all 50 are -inf"),
    ],
)
def test_an_error_names_row_and_step(options: dict[str, Any], value: float, every: bool, what: str) -> None:
    model, message = toy(), rf"step 2 of the generation: .* row 1: {what}\. To find"
    with model.hooks([("unembed.hook_out", spoil(2, 1, value, every))]):
        for cached in (True, False):
            with pytest.raises(ValueError, match=message):
                model.generate(ids(3, 4), 5, use_past_kv_cache=cached, **QUIET, **options)
        stream = model.generate_stream(ids(3, 4), 5, 1, **QUIET, **options)
        assert next(stream).shape == (3, 5)
        next(stream)
        with pytest.raises(ValueError, match=message):
            next(stream)
    assert torch.is_grad_enabled()


def test_a_token_whose_logit_is_minus_infinity_is_never_taken() -> None:
    model = toy()
    banned = torch.arange(D_VOCAB) != 9

    def ban(logits: Tensor, hook: Any) -> Tensor:
        return logits.masked_fill(banned, float("-inf"))

    with model.hooks([("unembed.hook_out", ban)]):
        assert (model.generate(ids(2, 4), 3, **QUIET)[:, 4:] == 9).all()


def test_a_finished_rows_logits_do_not_matter() -> None:
    model = toy()
    for seed in range(9):  # until the other row goes on for a while
        prompts = ids(2, 4, seed=seed)
        free = model.generate(prompts, 6, do_sample=False, **QUIET)[:, 4:]
        end = int(free[0, 0])
        if end not in free[1, :3]:
            break
    others = free[1].tolist()
    others = others[: others.index(end) + 1] if end in others else others
    options = {"do_sample": False, "verbose": False, "eos_token_id": end}
    with model.hooks([("unembed.hook_out", spoil(1, 0, float("nan"), True))]):
        assert model.generate(prompts, 6, **options)[1, 4:].tolist() == others
    with (
        model.hooks([("unembed.hook_out", spoil(1, 1, float("nan"), True))]),
        pytest.raises(ValueError, match=r"step 1 .* row 1"),
    ):
        model.generate(prompts, 6, **options)


def test_the_guard_that_the_error_speaks_of_finds_the_site() -> None:
    model = toy()
    with torch.no_grad():
        model.blocks[1].mlp.W_in[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"step 0 .* row 0: 50 of 50 are NaN"):
        model.generate(ids(1, 4), 3, **QUIET)
    guard = NanGuard("*", nan_only=True)
    with model.hooks([guard]), pytest.raises(ValueError, match=r"'blocks.1.mlp.hook_pre' is NaN"):
        model.generate(ids(1, 4), 3, **QUIET)


@pytest.mark.parametrize("options", [{"do_sample": False}, {}])
def test_an_encoder_decoder_says_so_too(options: dict[str, Any]) -> None:
    model = pair()
    source = torch.tensor([[3, 4], [5, 6]])
    for cached in (True, False):
        with (
            model.hooks([("unembed.hook_out", spoil(1, 1, float("nan")))]),
            pytest.raises(ValueError, match=r"step 1 of the generation: .* row 1: 1 of 12 are NaN"),
        ):
            model.generate(source, max_new_tokens=3, use_past_kv_cache=cached, **QUIET, **options)
    with pytest.raises(ValueError, match=r"step 0 .* row 0: all 12 are -inf"):
        model.generate(source, max_new_tokens=3, suppress_tokens=range(12), **QUIET, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_alone_names_the_row(temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[2, 4] = float("nan")
    with pytest.raises(ValueError, match=r"row 2: 1 of 5 are NaN, the first is that of token 4$"):
        sample_logits(logits, temperature=temperature)


def test_a_temperature_so_low_that_logits_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0: 2 of 3 are inf"):
        sample_logits(torch.tensor([[2.0, 2.0, 0.0]]), temperature=1e-39)
