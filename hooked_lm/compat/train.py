"""A simple training loop for language models on rows of tokens."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from hooked_lm.files import made_folder
from hooked_lm.progress import tqdm

__all__ = ["HookedTransformerTrainConfig", "train"]

Model = TypeVar("Model", bound=torch.nn.Module)
OPTIMIZERS = ("Adam", "AdamW", "SGD")


@dataclass
class HookedTransformerTrainConfig:
    """The settings of `train`.

    Attributes:
        num_epochs, batch_size: the number of epochs, and of rows per step.
        lr: the learning rate, after a linear warm-up of `warmup_steps` steps.
        seed: the seed of the order of the rows.
        momentum: for SGD.
        max_grad_norm: the norm to which gradients are clipped.
        weight_decay: decoupled from the gradient for Adam (AdamW, arXiv:1711.05101); None is no decay.
        optimizer_name: "Adam" or "AdamW", which are the same, or "SGD".
        device: the device of the training; None keeps the model's device.
        save_every, save_dir: the weights are saved to `save_dir/model_{step}.pt` after the first step and then every
            `save_every` steps, counted over all epochs from 0.
        wandb, wandb_project_name: report to Weights and Biases.
        print_every: print the loss every `print_every` steps; None prints nothing.
        max_steps: the maximum number of steps in an epoch.
    """

    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    seed: int = 0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    weight_decay: float | None = None
    optimizer_name: str = "Adam"
    device: str | torch.device | None = None
    warmup_steps: int = 0
    save_every: int | None = None
    save_dir: str | None = None
    wandb: bool = False
    wandb_project_name: str | None = None
    print_every: int | None = 50
    max_steps: int | None = None


def train(model: Model, config: HookedTransformerTrainConfig, dataset: Any) -> Model:
    """Trains a model in place on next-token prediction of rows `{"tokens": [pos]}` of equal lengths; returns the model.

    The order of the rows is drawn from a separate generator, so the process is not seeded. Raises ValueError, before
    training, for an unknown optimizer and for `save_every` without a `save_dir`.
    """
    log = _checked_log(config)
    if config.save_every is not None:
        made_folder(str(config.save_dir))
    generator = torch.Generator().manual_seed(config.seed)
    batches = DataLoader(dataset, batch_size=config.batch_size, shuffle=True, generator=generator)
    model.train()
    if config.device is not None:
        model.to(config.device)
    device = next(model.parameters()).device
    optimizer = _optimizer(model, config)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0)
    step = 0
    for epoch in range(1, config.num_epochs + 1):
        samples = 0
        for i, batch in enumerate(tqdm(batches, desc=f"epoch {epoch}", leave=False)):
            if i == config.max_steps:
                break
            tokens = batch["tokens"].to(device)
            loss = _step(model, tokens, optimizer, config.max_grad_norm)
            scheduler.step()
            samples += len(tokens)
            log({"train_loss": loss, "samples": samples, "epoch": epoch})
            if config.print_every is not None and step % config.print_every == 0:
                tqdm.write(f"Epoch {epoch} Samples {samples} Step {step} Loss {loss:.4f}")
            if config.save_every is not None and step % config.save_every == 0:
                torch.save(model.state_dict(), Path(str(config.save_dir), f"model_{step}.pt"))
            step += 1
    optimizer.zero_grad()
    return model


def _step(model: torch.nn.Module, tokens: torch.Tensor, optimizer: Optimizer, max_grad_norm: float | None) -> float:
    """Makes one step of the optimizer and returns the loss before it, in nats."""
    optimizer.zero_grad()
    loss = model(tokens, return_type="loss")
    loss.backward()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def _optimizer(model: torch.nn.Module, config: HookedTransformerTrainConfig) -> Optimizer:
    decay = config.weight_decay or 0.0
    if config.optimizer_name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=decay)


def _checked_log(config: HookedTransformerTrainConfig) -> Callable[[dict[str, Any]], None]:
    """Checks the config and returns the function that logs losses."""
    if config.optimizer_name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {config.optimizer_name!r}; known are {', '.join(OPTIMIZERS)}")
    if config.save_every is not None and config.save_dir is None:
        raise ValueError(f"save_every={config.save_every} needs a save_dir to save to")
    if not config.wandb:
        return lambda numbers: None
    try:
        import wandb  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError("wandb=True needs the package wandb: pip install wandb") from None
    wandb.init(project=config.wandb_project_name or "easy-transformer", config=asdict(config))
    return wandb.log
