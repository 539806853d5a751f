"""What weights say in tokens, against products that are multiplied out, norms applied one vector at a time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading import neurons
from hooked_lm.analysis.reading.neurons import copying_scores, head_top_tokens, neuron_top_tokens, seen_through, written
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import GRADIENT, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked

FAMILIES = ("gpt2", "llama", "gemma2", "gptj", "openai-gpt")


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def model_of(family: str) -> Any:
    return hooked(next(case for case in DECODER_CASES if case.family == family))


def norm_matrix(norm: Any, d_model: int) -> Tensor:
    """What a norm does to a stream of scale one, as a matrix [d_model, d_model]; made column by column."""
    if isinstance(norm, torch.nn.Identity):
        return torch.eye(d_model)
    columns = []
    for unit in torch.eye(d_model):
        centred = unit - unit.mean() if isinstance(norm, LayerNorm) else unit
        gain = torch.ones(d_model) if norm.w is None else norm.w + norm.cfg.offset
        columns.append(centred * gain)
    return torch.stack(columns)  # rows are inputs: x @ matrix


def parts(model: Any, layer: int) -> dict[str, Any]:
    """The dense matrices around a layer."""
    d_model, block = model.cfg.d_model, model.blocks[layer]
    is_post_norm = type(block).__name__ == "PostNormBlock"
    shares_norm = type(block).__name__ == "SharedNormBlock"
    identity = torch.nn.Identity()
    embedding = model.embed(torch.arange(model.cfg.d_vocab)[None])[0]
    return {
        "embedding": embedding,
        "logits": norm_matrix(norm_of(model, "ln_final"), d_model) @ model.unembed.W_U,
        "before attn": norm_matrix(identity if is_post_norm else block.ln1, d_model),
        "before mlp": norm_matrix(identity if is_post_norm else block.ln1 if shares_norm else block.ln2, d_model),
        "behind attn": norm_matrix(norm_of(block, "ln1_post"), d_model),
        "behind mlp": norm_matrix(norm_of(block, "ln2_post"), d_model),
    }


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_neurons_against_dense_products(family: str) -> None:
    model, layer, k = model_of(family), 1, 3
    mlp, around = model.blocks[layer].mlp, parts(model, layer)
    table = neuron_top_tokens(model, layer, [2, -1], k)
    expected = {"W_out": mlp.W_out @ around["behind mlp"] @ around["logits"]}
    for name in ("W_in", "W_gate"):
        if hasattr(mlp, name):
            expected[name] = (around["embedding"] @ around["before mlp"] @ getattr(mlp, name)).T
    assert len(table) == 2 * 2 * k * len(expected)
    assert ("W_gate" in expected) == (family in ("llama", "gemma2"))
    for (neuron, weight, sign), rows in table.groupby(["neuron", "weight", "sign"]):
        values = expected[weight][neuron].sort(descending=sign == "+")
        assert_close(torch.tensor(rows["value"].tolist()), values.values[:k])
        for token, value in zip(rows["token"], rows["value"], strict=True):
            assert_close(float(expected[weight][neuron, token]), value)
        assert rows["rank"].tolist() == list(range(k))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_heads_against_dense_circuits(family: str) -> None:
    model, layer, k = model_of(family), 1, 5
    attn, around = model.blocks[layer].attn, parts(model, layer)
    copying = copying_scores(model)
    for head in range(attn.W_Q.shape[0]):
        kv_head = head // (attn.W_Q.shape[0] // attn.W_V.shape[0])
        into, out = around["embedding"] @ around["before attn"], around["behind attn"] @ around["logits"]
        circuit = into @ attn.W_V[kv_head] @ attn.W_O[head] @ out  # [d_vocab, d_vocab]
        table = head_top_tokens(model, layer, head, k)
        best = circuit.flatten().sort(descending=True).values[:k]
        assert_close(torch.tensor(table["value"].tolist()), best)
        for _, row in table.iterrows():
            assert_close(float(circuit[int(row["source"]), int(row["token"])]), row["value"])
        eigenvalues = torch.linalg.eigvals(circuit.double())
        expected = float(eigenvalues.sum().real / eigenvalues.abs().sum())
        assert_close(copying.mean[layer, head], expected, depth=GRADIENT)


def test_a_head_that_copies_and_one_that_does_the_opposite() -> None:
    sizes = {"n_layers": 1, "d_model": 9, "n_heads": 3, "d_head": 9, "n_ctx": 8, "d_vocab": 9}
    cfg = HookedTransformerConfig(**sizes, attn_only=True, normalization_type=None, device="cpu", seed=0)
    model = HookedTransformer(cfg)
    turned = torch.eye(9).roll(1, 1)  # each token raises the next: as many eigenvalues on all sides of the circle
    with torch.no_grad():
        model.embed.W_E.copy_(torch.eye(9))
        model.unembed.W_U.copy_(torch.eye(9))
        model.blocks[0].attn.W_V.copy_(torch.eye(9).expand(3, -1, -1))
        model.blocks[0].attn.W_O.copy_(torch.stack([2 * torch.eye(9), -torch.eye(9), turned]))
    assert_close(copying_scores(model).mean, torch.tensor([[1.0, -1.0, 0.0]]))
    pairs = head_top_tokens(model, 0, 2, k=9)
    assert {(row.source, row.token) for row in pairs.itertuples()} == {(i, (i + 1) % 9) for i in range(9)}
    chosen = head_top_tokens(model, 0, 2, k=1, sources=[4, 8])
    assert chosen[["source", "token", "value"]].values.tolist() == [[4, 5, 1.0], [8, 0, 1.0]]


def test_norms_are_applied_as_they_run() -> None:
    """Behind a norm, the part of the output that is linear in the input, at the divisor of that input."""
    generator = torch.Generator().manual_seed(0)
    for norm in (LayerNorm(LayerNorm.Config(6)), RMSNorm(RMSNorm.Config(6, offset=1.0))):
        with torch.no_grad():
            norm.w.copy_(torch.randn(6, generator=generator))
            x, reader = torch.randn(4, 6, generator=generator), torch.randn(3, 6, generator=generator)
            centred = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
            divisor = (centred.square().mean(-1, keepdim=True) + norm.cfg.eps).sqrt()
            assert_close(written(norm, x), norm(x) * divisor)
            assert_close(x @ seen_through(norm, reader).T, (norm(x) * divisor) @ reader.T)


def test_small_parts_give_the_same(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> list[Any]:
        return [neuron_top_tokens(demo, 2, range(5), 2), head_top_tokens(demo, 3, 4, 5), head_top_tokens(demo, 0, 1, 5)]

    whole = read()
    monkeypatch.setattr(neurons, "NUMBERS", 1506 * 100)
    for table, again in zip(whole, read(), strict=True):
        assert table.drop(columns="value").equals(again.drop(columns="value"))
        assert_close(torch.tensor(table["value"].tolist()), torch.tensor(again["value"].tolist()))


@torch.no_grad()
def test_a_neuron_that_is_driven_raises_its_tokens(demo: HookedTransformer) -> None:
    """Not by weights: with its output put into the stream, the logits of its tokens rise most, at the stream's divisor."""
    layer, neuron = 3, 5
    site = f"blocks.{layer}.mlp.hook_post"
    tokens = demo.to_tokens("When Mary and John left")

    def drive(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, -1, neuron] += 1e4
        return value

    driven = demo.run_with_hooks(tokens, fwd_hooks=[(site, drive)])[0, -1] - demo.unembed.b_U
    table = neuron_top_tokens(demo, layer, neuron, k=4)
    raised = table[(table["weight"] == "W_out") & (table["sign"] == "+")]["token"].tolist()
    assert [demo.to_single_str_token(int(token)) for token in driven.topk(4).indices] == raised


def test_names_of_tokens_and_scales(demo: HookedTransformer) -> None:
    table = head_top_tokens(demo, 1, 0, k=2, sources=[" Mary", 7])
    assert table["source"].tolist() == [" Mary"] * 2 + [demo.to_single_str_token(7)] * 2
    assert copying_scores(demo).axes == {"layer": (0, 1, 2, 3), "head": tuple(range(8))}
    hybrid = copying_scores(model_of("bamba")).mean.isnan().all(1).tolist()
    assert hybrid == [not hasattr(block, "attn") for block in model_of("bamba").blocks]
    gemma = model_of("gemma2")  # whose embedding has a scale
    assert gemma.embed.cfg.scale != 1
    assert_close(neurons.embeddings(gemma)[3], F.embedding(torch.tensor(3), gemma.W_E) * gemma.embed.cfg.scale)


def test_bad_input(demo: HookedTransformer) -> None:
    with pytest.raises(IndexError, match="neuron 512 is out of range"):
        neuron_top_tokens(demo, 0, 512)
    with pytest.raises(IndexError, match="layer 4 is out of range"):
        neuron_top_tokens(demo, 4, 0)
    with pytest.raises(ValueError, match="k must be from 1 to 1506"):
        neuron_top_tokens(demo, 0, 0, k=0)
    with pytest.raises(ValueError, match="give at least one"):
        neuron_top_tokens(demo, 0, [])
    with pytest.raises(ValueError, match="mixture of experts"):
        neuron_top_tokens(model_of("mixtral"), 0, 0)
    with pytest.raises(ValueError, match="layer 0 has no MLP"):
        neuron_top_tokens(model_of("mamba"), 0, 0)
    with pytest.raises(IndexError, match="head 8 is out of range"):
        head_top_tokens(demo, 0, 8)
    with pytest.raises(ValueError, match="no attention"):
        head_top_tokens(model_of("mamba"), 0, 0)
    with pytest.raises(ValueError, match="layer 0 has no attention with the weights W_V and W_O"):
        head_top_tokens(model_of("deepseek_v2"), 0, 0)
    with pytest.raises(IndexError, match="token 1506 is out of range"):
        head_top_tokens(demo, 0, 0, sources=[1506])
