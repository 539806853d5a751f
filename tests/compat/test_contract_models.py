"""What clients of the known interface do with a model besides running it: replace its parts, move it, copy it, subclass it."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer, HookPoint, patching
from tests.close import assert_apart, assert_close
from tests.models.toys import ids, toy

TOKENS = ids(batch=2, n_pos=6)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


class Mine(nn.Module):
    """A foreign module with a weight and a hook point, called like the submodules of blocks."""

    def __init__(self, adds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.hook_mine, self.adds = nn.Linear(32, 32), HookPoint(), adds
        self.cfg = {"anything": 1}  # others have a cfg of their own

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.hook_mine(self.lin(x) + x if self.adds else self.lin(x))


PLACES = {
    "blocks.1.mlp": Mine(),
    "blocks.1.attn": Mine(),
    "blocks.1.ln1": nn.LayerNorm(32),
    "ln_final": nn.LayerNorm(32),
    "unembed": nn.Linear(32, 50),
    "blocks.1": Mine(adds=True),
    "blocks.1.hook_mlp_out": nn.Tanh(),
    "blocks.0.attn.hook_pattern": nn.Identity(),
}


def replaced(path: str, kind: str = "standard") -> HookedTransformer:
    model = toy(kind)
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, copy.deepcopy(PLACES[path]))
    model.setup()
    return model


@pytest.mark.parametrize("path", PLACES)
def test_a_part_is_replaced(path: str) -> None:
    """The other module is what runs; its points have names, caches and hooks; gradients go through it."""
    model = replaced(path)
    logits, cache = model.run_with_cache(TOKENS)
    if path != "blocks.0.attn.hook_pattern":  # there it does nothing
        assert_apart(logits, toy()(TOKENS))
    mine = f"{path}.hook_mine"
    if isinstance(PLACES[path], Mine):
        assert cache[mine].shape == (2, 6, 32)
        zeroed = model.run_with_hooks(TOKENS, fwd_hooks=[(mine, lambda value, hook: 0 * value)])
        assert mine in model.hook_dict
        assert_apart(zeroed, logits)
    assert_close(cache["resid_post", -1], model(TOKENS, stop_at_layer=3))
    model.requires_grad_(True)
    model(TOKENS, return_type="loss").backward()
    assert all(p.grad is not None for p in model.get_submodule(path).parameters())


@pytest.mark.parametrize("path", PLACES)
def test_what_was_replaced_is_left_alone_by_folding(path: str) -> None:
    model = replaced(path)
    before, own = model(TOKENS).log_softmax(-1), copy.deepcopy(model.get_submodule(path).state_dict())
    model.process_weights_()
    assert_close(model(TOKENS).log_softmax(-1), before)
    assert all(torch.equal(value, own[name]) for name, value in model.get_submodule(path).state_dict().items())
    assert "fold_ln" in model.cfg.processed
    centred = path in ("blocks.1.mlp", "blocks.1.attn", "unembed")  # elsewhere it might be seen
    assert ("center_writing_weights" in model.cfg.processed) == centred


@pytest.mark.parametrize("path", [path for path in PLACES if path not in ("blocks.1", "blocks.1.attn")])
def test_generation_with_what_was_replaced(path: str) -> None:
    """Equal with and without the cache; a block or attention that reads one token at a time would need a separate one."""
    model = replaced(path)
    assert torch.equal(model.generate(TOKENS, **GREEDY), model.generate(TOKENS, use_past_kv_cache=False, **GREEDY))


@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.attn"])
def test_modules_without_a_memory_generate_too(path: str) -> None:
    model = replaced(path)
    assert torch.equal(model.generate(TOKENS, **GREEDY), model.generate(TOKENS, use_past_kv_cache=False, **GREEDY))


@pytest.mark.parametrize("path", [path for path in PLACES if path != "unembed"])
def test_sweeps_are_those_of_a_loop(path: str) -> None:
    model = replaced(path)
    _, clean = model.run_with_cache(TOKENS[:1])

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 3] - logits[0, -1, 4]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = patching.get_act_patch_resid_pre(model, TOKENS[1:], clean, metric)
    assert (path in str(said[0].message)) if said else path == "blocks.0.attn.hook_pattern"
    for layer in range(3):
        for pos in range(6):

            def patch(value: Tensor, hook: Any, pos: int = pos) -> None:
                value[:, pos] = clean[hook.name][:, pos]

            site = f"blocks.{layer}.hook_resid_pre"
            if site not in model.all_points():
                continue
            assert_close(found[layer, pos], metric(model.run_with_hooks(TOKENS[1:], fwd_hooks=[(site, patch)])))


def test_a_hook_point_put_in_the_place_of_another() -> None:
    model = toy()
    expected = model(TOKENS)
    model.blocks[0].attn.hook_z = HookPoint()
    model.setup()
    model.setup()
    logits, cache = model.run_with_cache(TOKENS)
    assert model.blocks[0].attn.hook_z.name == "blocks.0.attn.hook_z"
    assert_close(logits, expected)
    assert cache["z", 0].shape == (2, 6, 4, 8)
    assert list(model.mod_dict) == [name for name, _ in model.named_modules() if name]


# ---- subclasses ------------------------------------------------------------------------------------------------------


class Counting(HookedTransformer):
    """A subclass with additional points, an `__init__`, and a `forward` that passes its arguments on."""

    def __init__(self, cfg: Any, tokenizer: Any = None, factor: float = 2.0) -> None:
        super().__init__(cfg, tokenizer=tokenizer)
        self.factor, self.n_runs = factor, 0
        self.hook_before, self.hook_after = HookPoint(), HookPoint()
        self.setup()

    def forward(self, input: Any, **kwargs: Any) -> Any:
        self.n_runs += 1
        out = super().forward(self.hook_before(input), **kwargs)
        return self.hook_after(out * self.factor) if isinstance(out, Tensor) else out


def test_a_subclass() -> None:
    model = Counting(toy().cfg)
    logits, cache = model.run_with_cache(TOKENS)
    assert_close(cache["hook_after"], logits)
    plain = HookedTransformer(toy().cfg)
    assert_close(logits, 2 * plain(TOKENS))
    zeroed = model.run_with_hooks(TOKENS, fwd_hooks=[("hook_after", lambda value, hook: 0 * value)])
    assert not zeroed.any()
    swapped = model.run_with_hooks(TOKENS, fwd_hooks=[("hook_before", lambda value, hook: value.flip(1))])
    assert_close(swapped, model(TOKENS.flip(1)))
    _, some = model.run_with_cache(TOKENS, names_filter="hook_after")
    assert list(some) == ["hook_after"]
    _, early = model.run_with_cache(
        TOKENS, return_type=None, names_filter=lambda name: name.endswith("hook_resid_post")
    )
    assert len(early) == 3
    before = model.n_runs
    assert torch.equal(model.generate(TOKENS, **GREEDY), plain.generate(TOKENS, **GREEDY))
    assert model.n_runs - before == 4


def test_a_subclass_is_loaded_copied_and_folded() -> None:
    model = Counting.from_pretrained("demo")
    assert type(model) is Counting
    again = copy.deepcopy(model)
    assert again.hook_dict["hook_after"] is again.hook_after is not model.hook_after
    assert_close(again(TOKENS), model(TOKENS))


# ---- places, precisions, modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda m: m.to(torch.float64), torch.float64), (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
        (lambda m: m.to(device="cpu", dtype=torch.float16), torch.float16), (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16), (lambda m: m.half().float(), torch.float32),
        (lambda m: m.double(), torch.float64), (lambda m: m.to(torch.zeros(1)), torch.float32),
        (lambda m: m.to("cpu", print_details=False), torch.float32), (lambda m: m.cpu(), torch.float32),
    ],
)  # fmt: skip
def test_the_config_follows_every_move(move: Callable[[Any], Any], dtype: torch.dtype) -> None:
    model = toy()
    assert move(model) is model
    assert (model.cfg.dtype, model.cfg.device, model.W_E.dtype) == (dtype, "cpu", dtype)
    logits, cache = model.run_with_cache(TOKENS)
    assert logits.dtype == cache["z", 0].dtype == dtype
    assert model.generate(TOKENS, **GREEDY).shape == (2, 10)
    model.move_model_modules_to_device()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
@pytest.mark.parametrize("place", ["cuda", "mps"])
def test_a_device_that_there_is_not(place: str) -> None:
    """PyTorch's own error, whose type depends on the device and the build, and the model is where it was."""
    model = toy()
    expected = model(TOKENS)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError), match=r"(?i)cuda|mps|nvidia"):
        getattr(model, place)()
    assert model.cfg.device == "cpu"
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize(
    "kind", ["standard", "rotary", "parallel", "alibi", "shortformer", "solu", "sinks", "attn_only"]
)
def test_autocast(kind: str) -> None:
    model = toy(kind).requires_grad_(True)
    exact = model(TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, cache = model.run_with_cache(TOKENS)
        loss = model(TOKENS, return_type="loss")
        generated = model.generate(TOKENS, **GREEDY)
        resid = cache.decompose_resid(apply_ln=True)
    assert logits.dtype == torch.bfloat16
    assert 0 < (logits - exact).abs().max() < 0.15 * exact.abs().max()
    assert resid.shape[1:] == (2, 6, 32)
    assert generated.shape == (2, 10)
    loss.backward()
    assert model.W_E.grad is not None or model.embed.W_E.grad is not None


def test_gradient_modes() -> None:
    model = toy().requires_grad_(True)
    torch.set_grad_enabled(False)
    try:
        assert not model(TOKENS).requires_grad
    finally:
        torch.set_grad_enabled(True)
    assert model(TOKENS).requires_grad
    with torch.inference_mode():
        logits, cache = model.run_with_cache(TOKENS)
        assert logits.is_inference()
        zeroed = model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.2.hook_resid_post", lambda value, hook: value.mul_(0))]
        )
        assert_close(zeroed, zeroed[:1, :1].expand_as(zeroed))
        model.generate(TOKENS, **GREEDY)
        assert cache.stack_head_results(incl_remainder=True).shape == (13, 2, 6, 32)
    assert_close(logits, model(TOKENS).detach())


# ---- copies and weights ----------------------------------------------------------------------------------------------


def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_whole])
@pytest.mark.parametrize("kind", ["standard", "tied", "rotary", "solu"])
def test_copies_have_weights_and_hooks_of_their_own(duplicate: Callable[[Any], Any], kind: str) -> None:
    model = toy(kind)
    model.add_hook("blocks.0.hook_resid_post", scaled)
    again = duplicate(model)
    expected = model(TOKENS)
    assert_close(again(TOKENS), expected)
    again.blocks[0].attn.W_Q.data.zero_()
    again.reset_hooks()
    assert_apart(again(TOKENS), expected)
    assert_close(model(TOKENS), expected)
    assert again.cfg.to_dict().keys() == model.cfg.to_dict().keys()


def scaled(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


@pytest.mark.parametrize("kind", ["standard", "rotary"])
@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O", "b_V"])
def test_edits_in_place_take_effect(kind: str, name: str) -> None:
    fields = {} if kind == "standard" else {"n_key_value_heads": 2}
    model = toy(kind, **fields)
    weight = getattr(model.blocks[1].attn, name)
    for edit in (
        lambda: weight.data.mul_(3),
        lambda: weight.data[0].neg_(),
        lambda: setattr(weight, "data", weight * 2),
    ):
        before = model(TOKENS)
        edit()
        assert_apart(model(TOKENS), before)
    if kind == "standard":
        assert torch.equal(getattr(model, name)[1], weight)


def test_views_of_the_ends_are_the_weights_themselves() -> None:
    model = toy()
    model.W_U.data.zero_()
    model.b_U.data.fill_(3)
    assert model(TOKENS).unique().tolist() == [3.0]
    model.W_E.data[:] = 0
    model.W_pos.data[:] = 0
    _, cache = model.run_with_cache(TOKENS)
    assert not cache["resid_pre", 0].any()


def test_training_some_parts() -> None:
    model = toy()
    model.blocks[1].attn.requires_grad_(True)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [f"blocks.1.attn.{name}" for name, _ in model.blocks[1].attn.named_parameters()]
    before, weights = model(TOKENS), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    first = model(TOKENS, return_type="loss")
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(TOKENS, return_type="loss")
        loss.backward()
        optimizer.step()
    assert loss < first
    assert_apart(model(TOKENS), before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert changed <= {*trained}
    assert "blocks.1.attn.W_V" in changed


def test_parameters_come_in_order_of_computation() -> None:
    names = [name for name, _ in toy().named_parameters()]
    assert names[:2] == ["embed.W_E", "pos_embed.W_pos"]
    assert names[-4:] == ["ln_final.w", "ln_final.b", "unembed.W_U", "unembed.b_U"]
    assert [n.split(".")[1] for n in names if n.startswith("blocks")] == sorted(
        n.split(".")[1] for n in names if n.startswith("blocks")
    )
    assert {n.split(".", 2)[2] for n in names if n.startswith("blocks.0.")} == {
        *("ln1.w", "ln1.b", "ln2.w", "ln2.b", "mlp.W_in", "mlp.b_in", "mlp.W_out", "mlp.b_out"),
        *(f"attn.{kind}_{part}" for kind in "Wb" for part in "QKVO"),
    }
