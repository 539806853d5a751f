"""Training of a language model on rows of tokens, with what every small study needs and no more."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

__all__ = ["HookedTransformerTrainConfig", "train"]

Model = TypeVar("Model", bound=torch.nn.Module)
OPTIMIZERS = ("Adam", "AdamW", "SGD")


@dataclass
class HookedTransformerTrainConfig:
    """How to train.

    Attributes:
        num_epochs, batch_size: how often the rows are gone through, and how many make a step.
        lr: the learning rate, reached after `warmup_steps` steps in a straight line from 0.
        seed: of the order of the rows.
        momentum: for SGD.
        max_grad_norm: longer gradients are scaled down to this norm.
        weight_decay: how much weights shrink, for Adam decoupled from the gradient (AdamW, arXiv:1711.05101); None: not.
        optimizer_name: "Adam" or "AdamW", which are one, or "SGD".
        device: where to; None leaves the model where it is.
        save_every, save_dir: after the first and then every so many steps the weights go to `model_{step}.pt` there;
            steps are counted over all epochs, from 0.
        wandb, wandb_project_name: report to Weights and Biases.
        print_every: say the loss every so many steps; None says nothing.
        max_steps: no more steps than this in an epoch.
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
    """Train a model, in place, to predict next tokens of rows `{"tokens": [pos]}` of equal lengths; it comes back.

    Nothing of the process is changed: the order of the rows comes from a generator of its own. Raises ValueError, before
    anything is done, for an unknown optimizer and for `save_every` without a `save_dir`.
    """
    log = _checked_log(config)
    if config.save_every is not None:
        Path(str(config.save_dir)).mkdir(parents=True, exist_ok=True)
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
    """One step of the optimizer; the loss before it, in nats."""
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
    """Where losses are reported to, once it is known that the config makes sense."""
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
