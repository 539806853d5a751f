"""Every family with one causal stream has a Jacobian lens; what has none is refused by what it lacks."""

import pytest
import torch

from hooked_lm.analysis import fit_jacobian_lens, logit_lens
from hooked_lm.models.checks import first_bidirectional, n_streams
from tests.close import GRADIENT, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt

# Parts that the rules of RelP do not know, and families without one of them that they do not know either.
UNKNOWN = {
    "GatedAttention", "GatedDeltaNet", "GatedSparseLatentAttention", "InputWeightedMoE", "KimiDeltaAttention", "MLSTM", "Mamba",
    "Mamba2", "MambaHeads", "MoE", "PerLayerGate", "QueryGatedSparseLatentAttention", "RGLRU", "RoutedAttention", "ShortConv",
    "ValueMaskedAttention", "WKV",
}  # fmt: skip
OTHERS = {"apertus", "apertus1p5_text", "zaya"}
REFUSED = r"'blocks\.\d+\S*' (is an? \w+, which multiplies|has .*: ratios of activations)"
FIRST = {case.family: case for case in reversed(DECODER_CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST)
def test_every_family(family: str):
    """The last layer's is the identity, so that it says what the model says; earlier ones are finite, and do something."""
    model, tokens = hooked(FIRST[family]), prompt(FIRST[family], batch=1, length=8)
    site = model.stack.site_after(model, model.cfg.n_layers - 1).rpartition("hook_")[2]
    if n_streams(model) > 1:
        with pytest.raises(ValueError, match=r"there is no Jacobian lens: this model has \d residual streams"):
            fit_jacobian_lens(model, tokens, site=site, held_out=0)
        return
    if model.reads_both_ways or first_bidirectional(model.blocks) is not None:
        with pytest.raises(ValueError, match="in both directions"):
            fit_jacobian_lens(model, tokens, site=site, held_out=0)
        return
    lens = fit_jacobian_lens(model, tokens, site=site, sinks=None, held_out=0)
    eye = torch.eye(model.cfg.d_model)
    assert_close(lens.J[-1], eye)
    assert bool(lens.J.isfinite().all())
    assert (lens.J[0] - eye).abs().max() > 1e-4
    parts = {type(part).__name__ for part in model.modules()}
    if parts & UNKNOWN or family in OTHERS:  # named by what the rules do not know
        with pytest.raises(ValueError, match=REFUSED):
            fit_jacobian_lens(model, tokens, site=site, backward="relp", sinks=None, held_out=0)
    else:
        relp = fit_jacobian_lens(model, tokens, site=site, backward="relp", sinks=None, held_out=0)
        assert_close(relp.J[-1], eye)
    said = logit_lens(model, tokens, site=site, lens=lens, layers=[-1], k=1)
    assert_close(said.logits[0, -1, 0, 0], model(tokens)[0, -1].max().detach().float(), depth=GRADIENT)
