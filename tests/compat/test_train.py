"""Training with the trainer of the shim: a model gets better, and each option does what it says."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.compat.train import HookedTransformerTrainConfig, train
from tests.close import assert_apart, assert_close, assert_near

Rows = list[dict[str, Tensor]]


def small(**options: Any) -> HookedTransformer:
    cfg: dict[str, Any] = {
        "n_layers": 1,
        "d_model": 16,
        "n_ctx": 8,
        "d_head": 8,
        "n_heads": 2,
        "d_vocab": 10,
        "d_mlp": 32,
    }
    return HookedTransformer(HookedTransformerConfig(**cfg | {"act_fn": "relu", "seed": 0, "device": "cpu"} | options))


@pytest.fixture(scope="module")
def counting() -> Rows:
    """Rows that count upwards, round and round: the next token is known."""
    starts = torch.randint(10, (64,), generator=torch.Generator().manual_seed(0))
    return [{"tokens": (start + torch.arange(8)) % 10} for start in starts]


def loss_on(model: HookedTransformer, rows: Rows) -> float:
    return model(torch.stack([row["tokens"] for row in rows]), return_type="loss").item()


def run(rows: Rows, model: HookedTransformer | None = None, **options: Any) -> HookedTransformer:
    settings = {"num_epochs": 1, "batch_size": 16, "lr": 1e-2, "print_every": None} | options
    return train(small() if model is None else model, HookedTransformerTrainConfig(**settings), rows)


def weights(model: HookedTransformer) -> Tensor:
    """All but the biases of keys, which change nothing, so that Adam makes steps of their rounding errors."""
    named = model.named_parameters()
    return torch.cat([weight.detach().flatten() for name, weight in named if not name.endswith("b_K")])


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_it_gets_better(counting: Rows, optimizer: str) -> None:
    model = small()
    before = loss_on(model, counting)
    assert (
        run(counting, model, num_epochs=10, optimizer_name=optimizer, lr=0.5 if optimizer == "SGD" else 1e-2) is model
    )
    assert loss_on(model, counting) < (0.9 if optimizer == "SGD" else 0.1) * before
    assert all(weight.grad is None for weight in model.parameters())


def test_the_seed_is_that_of_the_rows(counting: Rows) -> None:
    state = torch.get_rng_state()
    first, again, other = (run(counting, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert torch.equal(torch.get_rng_state(), state)


def by_hand(
    rows: Rows, optimizer: Any, n_steps: int, clip: float | None = None, rates: Any = None
) -> HookedTransformer:
    """All rows in every step, so that their order does not matter."""
    model = small()
    steps, tokens = optimizer(model.parameters()), torch.stack([row["tokens"] for row in rows])
    for step in range(n_steps):
        if rates is not None:
            steps.param_groups[0]["lr"] = rates[step]
        steps.zero_grad()
        model(tokens, return_type="loss").backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
    return model


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("options", "optimizer", "more"),
    [
        ({}, lambda weights: torch.optim.Adam(weights, lr=0.01), {}),
        ({"weight_decay": 2.0}, lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=2.0), {}),
        ({"optimizer_name": "AdamW"}, lambda weights: torch.optim.Adam(weights, lr=0.01), {}),
        (
            {"optimizer_name": "SGD", "momentum": 0.9, "weight_decay": 0.5, "lr": 0.1},
            lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.5),
            {},
        ),
        (
            {"optimizer_name": "SGD", "max_grad_norm": 0.01, "lr": 1.0},
            lambda weights: torch.optim.SGD(weights, lr=1.0),
            {"clip": 0.01},
        ),
        (
            {"optimizer_name": "SGD", "warmup_steps": 2, "lr": 1.0},
            lambda weights: torch.optim.SGD(weights, lr=1.0),
            {"rates": [0.0, 0.5, 1.0]},
        ),
    ],
    ids=["Adam", "decay", "AdamW", "momentum", "clipped", "warm-up"],
)
def test_steps_are_those_of_torch(
    counting: Rows, options: dict[str, Any], optimizer: Any, more: dict[str, Any]
) -> None:
    trained = run(counting, num_epochs=3, batch_size=64, **options)
    assert_close(weights(trained), weights(by_hand(counting, optimizer, 3, **more)))
    assert_apart(weights(trained), weights(by_hand(counting, optimizer, 2, **more)), times=5)  # a step more


def test_old_gradients_do_not_count(counting: Rows) -> None:
    model = small()
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 1e3)
    assert torch.equal(weights(run(counting, model, batch_size=64)), weights(run(counting, batch_size=64)))


def test_checkpoints(counting: Rows, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    trained = run(counting, num_epochs=2, save_every=3, save_dir=str(folder))  # steps 0 to 7
    assert sorted(path.name for path in folder.iterdir()) == ["model_0.pt", "model_3.pt", "model_6.pt"]
    fresh = small(seed=5)
    fresh.load_state_dict(torch.load(folder / "model_6.pt"))
    shorter = run(counting, num_epochs=2, batch_size=16, max_steps=None, save_every=None)
    assert torch.equal(weights(shorter), weights(trained))
    assert not torch.equal(weights(fresh), weights(trained))  # one step before the last
    one_step = small()
    one_step.load_state_dict(torch.load(folder / "model_0.pt"))
    assert torch.equal(weights(one_step), weights(run(counting, max_steps=1)))


def test_steps_in_an_epoch(counting: Rows) -> None:
    model, steps = small(), []
    model.register_forward_pre_hook(lambda module, arguments: steps.append(arguments[0].shape))
    run(counting, model, num_epochs=2, max_steps=3)
    assert steps == [(16, 8)] * 6


def test_losses_are_told(counting: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    run(counting, num_epochs=2, print_every=4)
    lines = capsys.readouterr().out.splitlines()
    first = loss_on(small(), counting)
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        "Epoch 1 Samples 16 Step 0 Loss",
        "Epoch 2 Samples 16 Step 4 Loss",
    ]
    assert_near(float(lines[0].split()[-1]), first, 0.1, because="the loss of one batch, not of all rows")
    assert float(lines[1].split()[-1]) < first
    run(counting)
    assert capsys.readouterr().out == ""


def test_weights_and_biases(counting: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, Any] = {}
    logged: list[dict[str, Any]] = []
    stub = SimpleNamespace(init=lambda **options: begun.update(options), log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    run(counting, wandb=True, wandb_project_name="mine", num_epochs=2)
    assert begun["project"] == "mine"
    assert begun["config"]["lr"] == 1e-2
    assert [(entry["epoch"], entry["samples"]) for entry in logged] == [
        (e, n) for e in (1, 2) for n in (16, 32, 48, 64)
    ]
    assert logged[-1]["train_loss"] < logged[0]["train_loss"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        run(counting, wandb=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"optimizer_name": "Lion"}, "unknown optimizer 'Lion'"), ({"save_every": 2}, "needs a save_dir")],
)
def test_mistakes_are_told_before_anything_is_done(counting: Rows, options: dict[str, Any], complaint: str) -> None:
    model = small()
    before = weights(model)
    with pytest.raises(ValueError, match=complaint):
        run(counting, model, **options)
    assert torch.equal(weights(model), before)


def test_the_config_is_left_as_it_was(counting: Rows) -> None:
    config = HookedTransformerTrainConfig(num_epochs=1, batch_size=64, print_every=None)
    train(small(), config, counting)
    assert config == HookedTransformerTrainConfig(num_epochs=1, batch_size=64, print_every=None)


def test_frozen_weights_stay(counting: Rows) -> None:
    model = small()
    model.embed.W_E.requires_grad_(False)
    before = model.W_E.clone()
    run(counting, model)
    assert torch.equal(model.W_E, before)
