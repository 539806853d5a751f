"""Small models, and helpers shared by the tests of ablation, tracing and knockout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.patching import Study
from tests.close import assert_close
from tests.models.structures import D_MODEL, D_VOCAB, N_CTX, random_model
from tests.models.toys import toy

NORM, MLP = LayerNorm.Config(D_MODEL), GatedMLP.Config(D_MODEL, 10)
GROUPED = Attention.Config(D_MODEL, 4, 4, n_key_value_heads=2, qkv_bias=True, rotary=Rotary(4))
BLOCKS: dict[str, tuple[Any, ...]] = {
    "hybrid": (
        MixerMLPBlock.Config(mixer=RGLRU.Config(D_MODEL, d_inner=8, n_channel_groups=2), ln1=NORM, mlp=MLP, ln2=NORM),
        PreNormBlock.Config(attn=GROUPED, ln1=NORM, mlp=MLP, ln2=NORM),
        MixerBlock.Config(mixer=Mamba.Config(D_MODEL, d_inner=16, d_state=3, dt_rank=2), ln1=NORM),
    ),
    "mixture": (
        PreNormBlock.Config(attn=GROUPED, ln1=NORM, mlp=MLP, ln2=NORM),
        PreNormBlock.Config(attn=GROUPED, ln1=NORM, mlp=MoE.Config(MLP, 4, 2, SoftmaxRouter()), ln2=NORM),
    ),
    "delta rule": (
        MixerMLPBlock.Config(mixer=GatedDeltaNet.Config(D_MODEL, 4, 3, 2, 5), ln1=NORM, mlp=MLP, ln2=NORM),
        PreNormBlock.Config(attn=GatedAttention.Config(**vars(GROUPED)), ln1=NORM, mlp=MLP, ln2=NORM),
    ),
    "states": (MixerBlock.Config(mixer=Mamba.Config(D_MODEL, d_inner=16, d_state=3, dt_rank=2), ln1=NORM),),
}


def built(kind: str) -> HookedTransformer:
    """The model with this name, from `MODELS` or the toys."""
    if kind not in BLOCKS:
        return toy(kind)
    unembed = Unembed.Config(D_MODEL, D_VOCAB)
    tree = DecoderConfig(N_CTX, Embed.Config(D_VOCAB, D_MODEL), BLOCKS[kind], unembed, ln_final=NORM)
    return random_model(tree).requires_grad_(False)


def ids(batch: int = 2, n_pos: int = 6, seed: int = 0) -> Tensor:
    """Prompts that all of these models can read."""
    return torch.randint(D_VOCAB, (batch, n_pos), generator=torch.Generator().manual_seed(seed))


def score(logits: Tensor) -> Tensor:
    """A metric of one number a prompt, which reads several positions."""
    return logits[:, -1, 3] - 2 * logits[:, 2, 5]


def run(model: HookedTransformer, tokens: Tensor, *hooks: tuple[str, Callable[..., Any]]) -> Tensor:
    """The metric of one whole forward pass."""
    return score(model.run_with_hooks(tokens, fwd_hooks=list(hooks)))


def setting(index: Any, value: Tensor | float) -> Callable[..., Tensor]:
    """A hook that replaces a part of the value."""

    def write(there: Tensor, hook: Any) -> Tensor:
        new = there.clone()
        new[index] = value[index] if isinstance(value, Tensor) else value
        return new

    return write


def cached(model: HookedTransformer, tokens: Tensor) -> dict[str, Tensor]:
    """The values of a run at all sites."""
    return model.run_with_cache(tokens, return_cache_object=False)[1]


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding, NaN where NaN is expected, and not everywhere the same."""
    assert_close(found, expected)
    assert expected[~expected.isnan()].std() > 1e-3, "nothing was changed"


def no_hook_is_left(model: HookedTransformer) -> bool:
    return not any(point.is_listening for point in model.hook_points())


@contextmanager
def global_generator_untouched() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "somebody drew from the global generator"


@contextmanager
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes cells fail the test: mistakes must be found before a sweep begins."""

    def begun(*_: Any, **__: Any) -> None:
        pytest.fail("the sweep has begun")

    with monkeypatch.context() as patch:
        patch.setattr(Study, "carry_out", begun)
        yield


def stopping_after(calls: int) -> Callable[[Tensor], Tensor]:
    """A metric that raises KeyboardInterrupt after this many calls."""
    count = iter(range(calls))

    def metric(logits: Tensor) -> Tensor:
        if next(count, None) is None:
            raise KeyboardInterrupt
        return score(logits)

    return metric
