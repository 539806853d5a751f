"""`model.compiled(...)`: graphs that equal eager runs with the same hooks, and what runs eagerly instead."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from hooked_lm.components.embeddings.rotary_scaling import DynamicScaling
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.models.compiled import Compiled
from tests.close import assert_apart, assert_close
from tests.core import thinned
from tests.models.toys import ids, padded, toy
from tests.unchecked import unchecked

KINDS = pytest.mark.parametrize("kind", thinned(["rotary", "windowed", "shortformer"], keep=["rotary"]))
EDITED = "blocks.1.hook_resid_pre"
TAPPED = ["z0", "pattern2", EDITED]


def compiled(kind: str = "rotary", **options: object) -> tuple[Compiled, Tensor]:
    """A compiled toy and the buffer of its edit."""
    model, edit = toy(kind), torch.zeros(32)
    return model.compiled(TAPPED, {EDITED: edit}, **{"backend": "traced", **options}), edit


def eager(run: Compiled, tokens: Tensor, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits and taps of an ordinary run with hooks that do the same."""
    edits = [(site, lambda value, hook, buffer=buffer: value + buffer) for site, buffer in run.edits.items()]
    with run.model.hooks(edits):
        return run.model.run_with_cache(tokens, names_filter=TAPPED, **options)


@KINDS
@torch.no_grad()
def test_a_graph_equals_an_eager_run_with_the_same_hooks(kind: str) -> None:
    run, edit = compiled(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly
        before = run(ids())
        assert_close(before, run.model(ids()))
        for seed, tokens in enumerate((ids(), ids(seed=3), ids(2, 5))):
            edit.normal_(generator=torch.Generator().manual_seed(seed))
            logits, cache = eager(run, tokens)
            assert_close(run(tokens), logits)
            assert list(run.taps) == list(cache)
            for site, value in cache.items():
                assert_close(run.taps[site], value)
            assert_close(run.taps["z", 0], cache["z", 0])
    assert_apart(run(ids()), before)


@pytest.mark.slow
@KINDS
@torch.no_grad()
def test_decode_steps_equal_those_with_a_growing_cache(kind: str) -> None:
    run, edit = compiled(kind)
    edit.normal_(generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (1, 5):  # the second prompt has another length, and the graph of the first
            tokens, mask = padded([ids(1, 7 + seed, seed=seed)[0], ids(1, 3, seed=4)[0]], "left")
            cache = KeyValueCache(len(run.model.blocks))
            expected, _ = eager(run, tokens, attention_mask=mask, past_kv_cache=cache)
            logits = run.prefill(tokens, 6, attention_mask=mask)
            assert_close(logits, expected[:, -1])
            for _ in range(6):
                new = logits.argmax(-1)
                logits, (expected, values) = run.step(new), eager(run, new[:, None], past_kv_cache=cache)
                assert_close(logits, expected[:, -1])
                assert_close(run.taps[EDITED], values[EDITED])
                pattern = values["pattern", 2]
                assert_close(run.taps["pattern", 2][..., -pattern.shape[-1] :], pattern)
            with pytest.raises(ValueError, match="no room for another token"):
                run.step(new)
    assert len(run._graphs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_what_a_graph_cannot_do_runs_eagerly_and_says_so_once() -> None:
    run, _ = compiled()
    model, plain = run.model, run(ids())
    with model.hooks([("blocks.0.hook_mlp_out", lambda value, hook: 2 * value)]):
        changed = model(ids())
        with pytest.warns(UserWarning, match="eagerly because of a hook that is not among its taps"):
            assert_close(run(ids()), changed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_close(run(ids()), changed)
    with pytest.warns(UserWarning, match="the option stop_at_layer="):
        assert_close(run(ids(), stop_at_layer=1), model(ids(), stop_at_layer=1))
    model.requires_grad_(True)
    with torch.enable_grad(), pytest.warns(UserWarning, match="gradients"):
        assert run(ids()).requires_grad
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match="not a tensor of token ids"):
        assert_close(run(ids()[0]), plain[:1])
    with pytest.raises(ValueError, match="out of range"):
        run(ids() + 1000)


@pytest.mark.slow
@torch.no_grad()
def test_a_hook_between_decode_steps_runs() -> None:
    run, _ = compiled()
    double = ("blocks.0.hook_mlp_out", lambda value, hook: 2 * value)
    cache = KeyValueCache(len(run.model.blocks))
    run.model(ids(), past_kv_cache=cache)
    run.prefill(ids(), 3)
    new = ids(3, 1, seed=7)
    with run.model.hooks([double]), pytest.warns(UserWarning, match="a hook that is not among"):
        assert_close(run.step(new[:, 0]), run.model(new, past_kv_cache=cache)[:, -1])
    assert_close(run.step(new[:, 0]), run.model(new, past_kv_cache=cache)[:, -1])


@pytest.mark.slow
@torch.no_grad()
def test_graphs_follow_weights_and_settings() -> None:
    run, _ = compiled()
    model, first = run.model, run(ids())
    model.blocks[0].mlp.W_out.mul_(3)
    assert_apart(run(ids()), first)
    assert_close(run(ids()), model(ids()))
    model.blocks[0].mlp.W_out = torch.nn.Parameter(model.blocks[0].mlp.W_out / 7, requires_grad=False)
    assert_close(run(ids()), model(ids()))
    model.cfg.fused_attention = "never"
    assert_close(run(ids()), model(ids()))
    model.to(torch.bfloat16)
    run.edits[EDITED].data = run.edits[EDITED].bfloat16()
    assert run(ids()).dtype == torch.bfloat16


def other_norm(model: Any) -> None:
    norm = model.blocks[1].ln1
    norm.cfg = replace(norm.cfg, eps=2.0)


def other_forward(model: Any) -> None:
    mlp, forward = model.blocks[2].mlp, model.blocks[2].mlp.forward
    mlp.forward = lambda x: forward(x) / 2


CHANGES: dict[str, Callable[[Any], None]] = {
    "an activation": lambda model: setattr(model.blocks[0].mlp, "act_fn", torch.relu),
    "the scale of attention": lambda model: setattr(model.blocks[1].attn, "scale", 0.1),
    "the config of a norm": other_norm,
    "the forward of a module": other_forward,
}


@pytest.mark.every_parameter
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_graphs_follow_what_modules_read(change: str) -> None:
    run, _ = compiled()
    before = run(ids())
    CHANGES[change](run.model)
    after = run.model(ids())
    assert_apart(after, before)
    assert_close(run(ids()), after)


@torch.no_grad()
def test_graphs_follow_the_class_of_a_module_and_hooks_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = compiled()
    before, mlp = run(ids()), type(run.model.blocks[0].mlp)
    with monkeypatch.context() as patched:
        forward = mlp.forward
        patched.setattr(mlp, "forward", lambda self, x: 2 * forward(self, x))
        assert_close(run(ids()), after := run.model(ids()))
        assert_apart(after, before)
    handle = register_module_forward_hook(lambda module, given, out: 2 * out if isinstance(module, mlp) else None)
    try:
        with pytest.warns(UserWarning, match="a hook that is not among its taps"):
            assert_close(run(ids()), after)
    finally:
        handle.remove()
    assert_close(run(ids()), before)


@torch.no_grad()
def test_a_prompt_that_ends_with_padding_is_refused() -> None:
    tokens, mask = padded([ids(1, 7)[0], ids(1, 3, seed=4)[0]], "right")
    run, _ = compiled()
    with pytest.raises(ValueError, match="row 1 of attention_mask ends with padding"):
        run.prefill(tokens, 2, attention_mask=mask)
    run.prefill(tokens[:1], 2, attention_mask=mask[:1])


@torch.no_grad()
def test_angles_that_depend_on_the_length_are_decoded_eagerly() -> None:
    model = toy("rotary")
    attn = model.blocks[0].attn
    attn.cfg = replace(attn.cfg, rotary=replace(attn.cfg.rotary, scaling=DynamicScaling(4.0, 8)))
    run = model.compiled(backend="traced")
    with pytest.warns(UserWarning, match="rotary angles that depend on the number of tokens"):
        run.prefill(ids(), 2)
    cache = KeyValueCache(len(model.blocks))
    model(ids(), past_kv_cache=cache)
    new = ids(3, 1, seed=7)
    assert_close(run.step(new[:, 0]), model(new, past_kv_cache=cache)[:, -1])


@torch.no_grad()
def test_a_mixture_of_experts_runs_eagerly(capfd: pytest.CaptureFixture[str]) -> None:
    model = toy(
        {"act_fn": "silu", "gated_mlp": True, "num_experts": 4, "experts_per_token": 2, "normalization_type": "RMS"}
    )
    run = model.compiled(["resid_post0"], backend="traced")
    with pytest.warns(UserWarning, match="a graph that could not be made: GuardOnDataDependent"):
        assert_close(run(ids()), model(ids()))
    assert run.taps["resid_post", 0].shape == (3, 10, 32)
    assert "def forward" not in "".join(capfd.readouterr())


def test_bad_input() -> None:
    model = toy()
    with pytest.raises(KeyError, match="hook_resid_pr"):
        model.compiled(taps="blocks.0.hook_resid_pr")
    with pytest.raises(TypeError, match="edit"):
        model.compiled(edits={EDITED: 1.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is on meta, but the model is on cpu"):
        model.compiled(edits={EDITED: torch.zeros(32, device="meta")})
    with pytest.raises(ValueError, match="backend must be one of"):
        model.compiled(backend="fast")
    with pytest.raises(ValueError, match="max_new_tokens must be 1 to 14, got 20"):
        model.compiled().prefill(ids(), 20)


@pytest.mark.slow
@torch.no_grad()
def test_a_step_takes_one_id_for_each_row() -> None:
    run, _ = compiled()
    logits = run.prefill(ids(3, 5), 2)
    for wrong in (ids(3, 1), ids(1, 2)[0], torch.tensor(1)):
        with unchecked(), pytest.raises(ValueError, match=r"one id for each row of the prompt, \[3\]; got shape"):
            run.step(wrong)
    for _ in range(2):  # a refused step took no room
        logits = run.step(logits.argmax(-1))


INDUCTOR = """
import torch
from tests.close import assert_close
from tests.models.toys import ids
from tests.models.test_compiled import EDITED, compiled, eager
with torch.no_grad():
    run, edit = compiled(backend="inductor")
    run(ids())
    edit.fill_(0.5)
    logits, cache = eager(run, ids(seed=2))
    assert_close(run(ids(seed=2)), logits)
    assert_close(run.taps[EDITED], cache[EDITED])
    assert run._warned == set(), run._warned
print("compiled")
"""


@pytest.mark.slow
def test_inductor() -> None:
    """In a separate process, because compiled code stays in memory."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", INDUCTOR], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr
