"""Layers of one kind each (a short convolution, Mamba, attention, an MLP): cells in one pass are what whole passes give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock, MLPOnlyBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.families.decoders.lfm2.short_conv import ShortConv
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_close
from tests.core import thinned
from tests.engine.small import ids
from tests.models.structures import D_MODEL, D_VOCAB, N_CTX, random_model

NORM, MLPS = LayerNorm.Config(D_MODEL), MLP.Config(D_MODEL, 10)
SMALL = RMSNorm.Config(2), RMSNorm.Config(3)
MAMBA = Mamba.Config(D_MODEL, d_inner=16, d_state=3, dt_rank=2, dt_norm=SMALL[0], state_norm=SMALL[1])
BLOCKS = (
    MLPOnlyBlock.Config(mlp=MLPS, ln2=NORM),
    MixerMLPBlock.Config(mixer=ShortConv.Config(D_MODEL, bias=True), ln1=NORM, ln1_post=NORM, mlp=MLPS, ln2=NORM),
    MLPOnlyBlock.Config(mlp=MLPS, ln2=NORM, ln2_post=NORM, residual_scale=0.5),
    AttentionOnlyBlock.Config(attn=Attention.Config(D_MODEL, 4, 4, n_key_value_heads=2), ln1=NORM),
    MixerBlock.Config(mixer=MAMBA, ln1=NORM),
    MLPOnlyBlock.Config(mlp=MLPS, ln2=NORM),
)
N_POS = 7


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    tree = DecoderConfig(N_CTX, Embed.Config(D_VOCAB, D_MODEL), BLOCKS, Unembed.Config(D_MODEL, D_VOCAB), ln_final=NORM)
    return random_model(tree, dtype=torch.float64).requires_grad_(False)


def halved(value: Tensor) -> Tensor:
    return 0.5 * value


def everything(logits: Tensor) -> Tensor:
    return logits.square().mean((1, 2))


def last(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def whole(model: HookedTransformer, tokens: Tensor, edits: list[Edit]) -> Tensor:
    """The logits of a whole pass with these edits."""

    def hook(edit: Edit) -> Callable:
        def apply(value: Tensor, hook: object) -> Tensor:
            value = value.clone()
            value[:, list(edit.positions)] = halved(value[:, list(edit.positions)])
            return value

        return apply

    return model.run_with_hooks(tokens, fwd_hooks=[(edit.site, hook(edit)) for edit in edits])


@pytest.mark.slow
@pytest.mark.parametrize("metric", thinned([everything, last], keep=[last]))
def test_every_site_of_every_kind(model: HookedTransformer, metric: Callable) -> None:
    tokens = ids(2, N_POS)
    sites = [
        name for name, point in model.all_points().items() if name.startswith("blocks.") and point.dims[1] == "pos"
    ]
    sites = [name for name in sites if not name.endswith("_input")]
    experiment = Experiment(model, tokens, [metric])
    assert experiment.fallback_reason is None
    assert set(sites) <= set(experiment.site_infos)
    cells = [[Edit(site, halved, (pos,))] for site in sites for pos in (2, N_POS - 1)]
    cells += [[Edit(sites[i], halved, (1,)), Edit(sites[-1 - i], halved, (4,))] for i in range(0, len(sites), 3)]
    for index, scores in experiment.run(cells, progress=False):
        assert_close(scores[0], metric(whole(model, tokens, cells[index])), dtype=torch.float32, msg=str(cells[index]))
    assert experiment.cost.forwards == 1


def test_an_mlp_alone_computes_the_changed_positions_only(model: HookedTransformer) -> None:
    """No later position depends on a change in the last layer, which does not mix tokens."""
    experiment = Experiment(model, ids(2, N_POS), [everything])
    list(experiment.run([], progress=False))
    before = experiment.cost.layer_rows
    list(experiment.run([[Edit("blocks.5.hook_resid_pre", halved, (2,))]], progress=False))
    assert experiment.cost.layer_rows - before == 2  # one position of both prompts


def test_the_stream_is_the_sum_of_its_parts(model: HookedTransformer) -> None:
    tokens = ids(2, N_POS)
    logits, cache = model.run_with_cache(tokens)
    parts, labels = cache.decompose_resid(-1, return_labels=True)
    assert labels[-6:] == ["1_mixer_out", "1_mlp_out", "2_mlp_out", "3_attn_out", "4_mixer_out", "5_mlp_out"]
    assert_close(parts.sum(0), cache["resid_post", 5])
    full, names = cache.get_full_resid_decomposition(-1, expand_neurons=False, return_labels=True)
    assert_close(full.sum(0), cache["resid_post", 5])
    assert len(names) == len(full)
    assert model.verify(tokens).ok
    before = logits.log_softmax(-1)
    copied = HookedTransformer(model.cfg).double()
    copied.load_state_dict(model.state_dict())
    copied.process_weights_()
    assert_close(copied(tokens).log_softmax(-1), before)


def test_output_biases_of_layers_without_mixing(model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="norm"):
        model.accumulated_bias(3)  # block 1 normalises the output of its mixer
    assert_close(model.accumulated_bias(1), model.blocks[0].mlp.b_out)
