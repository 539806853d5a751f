"""Tokens and positions into the stream, and out of it again through a narrower space."""

import math

import pytest
import torch

from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.factored_embed import FactoredEmbed, FactoredUnembed, TiedFactoredUnembed
from hooked_lm.components.embeddings.pos_embed import FairseqSinusoidalEmbed, PosEmbed, SinusoidalEmbed
from hooked_lm.components.embeddings.transformed_unembed import untied
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.verification import output_weights
from tests.close import assert_close

TOKENS = torch.tensor([[3, 0, 5], [1, 1, 2]])
D_VOCAB, D_MODEL, D_EMBED = 7, 6, 4


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


def test_a_normalised_embedding():
    embed = drawn(Embed.Config(D_VOCAB, D_MODEL, scale=2.0, norm=LayerNorm.Config(D_MODEL, 0.1)).build())
    rows = 2 * embed.W_E[TOKENS]
    expected = torch.nn.functional.layer_norm(rows, (D_MODEL,), embed.ln.w, embed.ln.b, 0.1)
    assert_close(embed(TOKENS), expected)
    assert output_weights(embed) == []


def test_the_scale_has_the_precision_of_the_weights():
    embed, tokens = drawn(Embed.Config(7, 4, scale=math.sqrt(3072)).build()).bfloat16(), torch.tensor([[0, 6, 2]])
    expected = embed.W_E[tokens] * torch.tensor(math.sqrt(3072), dtype=torch.bfloat16)
    assert torch.equal(embed(tokens), expected)
    assert not torch.equal(embed(tokens), embed.W_E[tokens] * math.sqrt(3072))


@pytest.mark.parametrize("bias", [False, True])
def test_a_factored_embedding(bias: bool):
    embed = drawn(FactoredEmbed.Config(D_VOCAB, D_MODEL, scale=3.0, d_embed=D_EMBED, bias=bias).build())
    expected = embed.W_E[TOKENS] @ embed.W_proj
    if bias:
        expected = expected + embed.b_proj
    assert_close(embed(TOKENS), 3 * expected)
    assert_close(embed.table()[TOKENS], expected)
    assert len(output_weights(embed)) == 1 + bias


def test_rows_before_the_positions_are_apart():
    pos_embed = drawn(PosEmbed.Config(5, D_MODEL, offset=2).build())
    assert (pos_embed.W_pos.shape, pos_embed.before.shape) == ((5, D_MODEL), (2, D_MODEL))
    assert torch.equal(pos_embed.at(torch.tensor([[0, 4]]))[0], pos_embed.W_pos[[0, 4]])
    assert not pos_embed.before.requires_grad
    assert "before" not in dict(PosEmbed.Config(5, D_MODEL).build().named_parameters())


@pytest.mark.parametrize(
    ("kind", "exponent"),
    [
        (SinusoidalEmbed, lambda i: 2 * i / D_MODEL),
        (FairseqSinusoidalEmbed, lambda i: i / (D_MODEL / 2 - 1)),
    ],
)
@pytest.mark.parametrize("offset", [0, 2])
def test_sines_and_cosines(kind: type[SinusoidalEmbed], exponent, offset: int):
    found = kind.Config(D_MODEL, offset=offset).build().at(torch.tensor([[0, 1, 30]]))[0]
    half = range(D_MODEL // 2)
    for row, position in zip(found.tolist(), (0, 1, 30), strict=True):
        angles = [(position + offset) / 10000 ** exponent(i) for i in half]
        assert_close(row, [*map(math.sin, angles), *map(math.cos, angles)])


def test_an_odd_width_has_no_pairs():
    with pytest.raises(ValueError, match="even d_model, got 5"):
        SinusoidalEmbed.Config(5).build()


@pytest.mark.parametrize("tied", [False, True])
def test_a_factored_unembedding(tied: bool):
    embed = drawn(FactoredEmbed.Config(D_VOCAB, D_MODEL, d_embed=D_EMBED).build())
    unembed = drawn(FactoredUnembed.Config(D_MODEL, D_VOCAB, bias=True, tied=tied, d_embed=D_EMBED).build(embed))
    x = torch.randn(2, 3, D_MODEL)
    vocab = embed.W_E.T if tied else unembed.W_vocab
    expected = x @ unembed.W_proj @ vocab + unembed.b_U
    assert_close(unembed(x), expected)
    assert_close(unembed.unhooked(x), expected)
    assert isinstance(unembed, TiedFactoredUnembed) is tied
    assert ("W_vocab" in dict(unembed.named_parameters())) is not tied

    own = untied(unembed)
    assert type(own) is Unembed
    assert own.cfg.tied is False
    assert_close(own(x), expected)
    assert untied(own) is own
