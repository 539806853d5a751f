"""circuitsvis: it is given tensors, and writes them into a page; what our caches give has to arrive there."""

import json
import re
from typing import Any

import pytest
import torch
from circuitsvis.activations import text_neuron_activations
from circuitsvis.attention import attention_heads, attention_pattern, attention_patterns
from circuitsvis.logits import token_log_probs
from circuitsvis.tokens import colored_tokens, colored_tokens_multi, visualize_model_performance
from circuitsvis.topk_samples import topk_samples
from circuitsvis.topk_tokens import topk_tokens
from torch import Tensor

from hooked_lm import ActivationCache, HookedTransformer
from tests.close import assert_apart, assert_close

TEXT = "When Mary and John went to the store, John gave a drink to Mary"
OTHER = "The next day, Anna slept late because"
Run = tuple[HookedTransformer, Tensor, list[str], Tensor, ActivationCache]


@pytest.fixture(scope="module")
def run() -> Run:
    model = HookedTransformer.from_pretrained("demo")
    tokens = model.to_tokens(TEXT)
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens, remove_batch_dim=True)
    return model, tokens, model.to_str_tokens(TEXT), logits[0], cache


def drawn(page: Any) -> tuple[str, dict[str, Any]]:
    """The name of what is drawn, and what it is given, as a browser would read them."""
    html = str(page)
    [(name, given)] = re.findall(
        r'render\(\s*"circuits-vis-[^"]*",\s*(\w+),\s*(\{.*\})\s*\)\s*</script>', html, re.DOTALL
    )
    assert json.dumps(json.loads(given)) in page.local_src, "without a network the same is drawn"
    return name, json.loads(given)


def same(found: Any, expected: Tensor) -> None:
    assert_close(torch.tensor(found), expected)


def test_attention_of_all_heads(run: Run) -> None:
    _, _, words, _, cache = run
    name, given = drawn(attention_heads(cache["pattern", 1], words, [f"1.{head}" for head in range(8)]))
    assert name == "AttentionHeads"
    assert given["tokens"] == words
    same(given["attention"], cache["pattern", 1])
    assert_apart(torch.tensor(given["attention"]), cache["pattern", 2])
    assert given["attentionHeadNames"][7] == "1.7"


def test_attention_patterns(run: Run) -> None:
    _, _, words, _, cache = run
    name, given = drawn(attention_patterns(tokens=words, attention=cache["pattern", 0]))
    assert name == "AttentionPatterns"
    same(given["attention"], cache["pattern", 0])
    name, given = drawn(attention_pattern(words, cache["attn_scores", 0][3].exp(), mask_upper_tri=True))
    assert name == "AttentionPattern"
    same(given["attention"], cache["attn_scores", 0][3].exp())


def test_tokens_in_colours(run: Run) -> None:
    _, _, words, _, cache = run
    values = cache["resid_post", 3].norm(dim=-1)
    name, given = drawn(colored_tokens(words, values))
    assert (name, given["tokens"]) == ("ColoredTokens", words)
    same(given["values"], values)
    neurons = cache["post", 2][:, :5]
    _, given = drawn(colored_tokens_multi(words, neurons, labels=[f"L2N{n}" for n in range(5)]))
    same(given["values"], neurons)


def test_how_well_a_text_is_predicted(run: Run) -> None:
    model, tokens, words, logits, _ = run
    loss = model(tokens, return_type="loss", loss_per_token=True)[0].detach()
    _, given = drawn(visualize_model_performance(tokens, words, logits))
    assert given["labels"] == ["logits", "log_probs", "probs"]
    assert given["tokens"] == words[1:]
    assert_close(torch.tensor(given["values"])[:, 1], -loss)


def test_log_probabilities_of_tokens(run: Run) -> None:
    model, tokens, words, logits, _ = run
    page = token_log_probs(tokens, logits.log_softmax(-1), model.to_string, top_k=4)
    name, given = drawn(page)
    loss = model(tokens, return_type="loss", loss_per_token=True)[0].detach()
    assert name == "TokenLogProbs"
    assert given["prompt"] == words
    assert_close(torch.tensor(given["correctTokenLogProb"]), -loss)
    top = logits[:-1].topk(4).indices
    assert given["topKTokens"] == [[model.to_string(token) for token in row] for row in top]
    ranks = (logits[:-1] > logits[:-1].gather(1, tokens[0, 1:, None])).sum(1)
    assert given["correctTokenRank"] == ranks.tolist()
    assert given["correctTokenRank"][-1] == 0, "the model knows who receives the drink"


def test_neurons_of_a_text(run: Run) -> None:
    model, _, words, _, cache = run
    values = cache.stack_activation("post")  # [layer, pos, d_mlp]
    name, given = drawn(text_neuron_activations(words, values[:, :, :6].transpose(0, 1)))
    assert name == "TextNeuronActivations"
    found = torch.tensor(given["activations"])
    assert found.shape == (len(words), model.cfg.n_layers, 6)
    same(found[:, 2].tolist(), cache["post", 2][:, :6])


def test_strongest_tokens_of_some_texts(run: Run) -> None:
    model, _, words, _, cache = run
    _, other = model.run_with_cache(OTHER, remove_batch_dim=True)
    stacks = [found.stack_activation("post")[:, :, :3].detach() for found in (cache, other)]
    name, given = drawn(topk_tokens([words, model.to_str_tokens(OTHER)], [found.numpy() for found in stacks], max_k=3))
    assert name == "TopkTokens"
    for found, expected in zip(given["topkVals"], stacks, strict=True):
        same(found, expected.topk(3, dim=1).values)
    for found, expected in zip(given["bottomkVals"], stacks, strict=True):
        same(found, expected.topk(3, dim=1, largest=False).values.flip(1))


def test_strongest_samples(run: Run) -> None:
    _, _, words, _, cache = run
    values = cache["post", 2][:, :2].T
    rows = values.tolist()
    name, given = drawn(topk_samples([[[words], [words]]], [[[row] for row in rows]]))
    assert name == "TopkSamples"
    same([sample[0] for sample in given["activations"][0]], values)
