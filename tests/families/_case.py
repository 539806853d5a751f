"""What a line of the table of architectures is, the sizes and stretchings that many lines share, and its HF model.

The norms' eps is large on purpose: 1e-6 and 1e-5 would give the same logits.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from hooked_lm.hub.composite import text_config
from tests.families._composite import composite


@dataclass(frozen=True)
class Case:
    """A model type, what is special about this config, its fields, and the length of prompt at which it matters.

    `auto` is the transformers class that builds it from the config, `attention` the path that it takes. `adjust` changes
    the weights that were drawn, where plain random ones would leave part of the model without effect or make numbers
    explode.

    A family that exists only as the language model of composites has in `composite` the model type of one. It is built with
    tiny towers around a language model of these fields, and everything is asked of it on text alone.
    """

    family: str
    name: str
    fields: dict[str, Any] = field(hash=False)
    n_prompt: int = 16
    auto: str = "AutoModelForCausalLM"
    attention: str = "eager"
    adjust: Callable[[nn.Module], None] | None = field(default=None, hash=False, compare=False)
    composite: str | None = None

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def known(cases: Iterable[Case]) -> list[Case]:
    """The cases of model types that the installed transformers has; the oldest, which `make test-range` installs, lacks some."""
    from transformers import CONFIG_MAPPING

    return [case for case in cases if case.family in CONFIG_MAPPING and str(case) not in WRONG]


# What transformers computed wrongly before 5.23: a norm over all groups of Mamba-2, logits of PaliGemma without their soft cap.
# Goes when pyproject.toml asks for 5.23.
WRONG = ("mamba2-grouped", "paligemma") if Version(version("transformers")) < Version("5.23") else ()


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "rms_norm_eps": 0.02}
FULL = {"num_key_value_heads": 4, "rms_norm_eps": 0.05}
LONG_FACTORS = {"short_factor": [1.0, 1.3, 2.0, 2.5], "long_factor": [1.5, 2.0, 4.0, 9.0]}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A stretched rotary embedding, in the form of checkpoints since transformers 5."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


LINEAR = rope("linear", factor=3.0)
DYNAMIC = rope("dynamic", factor=3.0)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
YARN_MSCALE = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.2, mscale_all_dim=0.6, truncate=False
)
LONGROPE = {
    **rope("longrope", original_max_position_embeddings=40, **LONG_FACTORS),
    "max_position_embeddings": 80,
}


@lru_cache(maxsize=8)
def reference(case: Case) -> nn.Module:
    """A transformers model of this config, its weights drawn so that logits are of order one and attention is uneven.

    Biases and norms are random too. Whoever wants to change it takes a copy.
    """
    with torch.random.fork_rng(devices=[]):  # transformers draws what `draw` only adds to, such as class tokens
        torch.manual_seed(0)
        return drawn(built(case), case)


def built(case: Case) -> Any:
    """A transformers model of this config, with the weights that transformers draws."""
    import transformers

    fields = copy.deepcopy(case.fields)  # which it may change
    if case.composite is not None:
        return composite(case.composite, {**fields, "model_type": case.family}, case.attention)
    config = transformers.CONFIG_MAPPING[case.family](**fields)
    config._attn_implementation, config._experts_implementation = case.attention, "eager"
    model_class = getattr(transformers, case.auto)
    return model_class.from_config(config) if case.auto.startswith("Auto") else model_class(config)


def drawn(model: Any, case: Case) -> nn.Module:
    """The model with weights drawn at random, and adjusted as the case says."""
    draw(model, seed=len(str(case)))
    if case.adjust is not None:
        with torch.no_grad():
            case.adjust(model)
    return model


@torch.no_grad()
def draw(model: Any, seed: int) -> Any:
    """The model with new random weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.eval().parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.25 * noise)
    return model


def embed_padding(model: Any) -> None:
    """For models that have to have a padding token, whose embedding would have no gradient."""
    model.get_input_embeddings().padding_idx = None


def config_of(model: Any) -> Any:
    """The config of a model of transformers; of a composite, that of its language model."""
    return model.config if (text := text_config(model.config)) is None else text
