"""What a kind of model cannot do, it says; and what it can do with fewer layers, it does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, patching, pretrained
from tests.close import assert_close
from tests.families import CASES, Case, reference

BERT = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.tensor([[5, 3, 9, 1, 7]])


def first(family: str) -> Case:
    return next(case for case in CASES if case.family == family)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gpt_neo", "mamba", "mamba2", "qwen3", "gemma2", "smollm3", "deepseek_v3", "bamba", "recurrent_gemma"],
)
def test_a_model_of_fewer_layers_goes_back(family: str) -> None:
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(first(family)), first_n_layers=1)
    with torch.no_grad():
        assert_close(model.to_hf()(IDS, use_cache=False).logits, model(IDS))


def test_a_config_that_cannot_say_fewer_layers() -> None:
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(first("gemma4_text")), first_n_layers=2)
    with pytest.raises(ValueError, match="cannot say that there are 2 layers"):
        model.to_hf()


def test_spans_and_numbers_are_no_words() -> None:
    asks = HookedEncoder.from_pretrained("tiny", hf_model=BertForQuestionAnswering(BertConfig(**BERT)).eval())
    with pytest.raises(ValueError, match="span"):
        asks(IDS, return_type="predictions")
    rates = BertForSequenceClassification(BertConfig(**BERT, num_labels=1)).eval()
    with pytest.raises(ValueError, match="does not support regression"):
        HookedEncoder.from_pretrained("tiny", hf_model=rates)(IDS, return_type="predictions")


def test_several_labels() -> None:
    config = BertConfig(**BERT, num_labels=3, problem_type="multi_label_classification")
    theirs = BertForSequenceClassification(config).eval()
    theirs.classifier.bias.data = torch.tensor([9.0, -9.0, 9.0])
    model = HookedEncoder.from_pretrained("tiny", hf_model=theirs)
    assert model(IDS, return_type="predictions") == ["LABEL_0", "LABEL_2"]


def test_what_is_made_for_one_stack_refuses_two_and_names_what_takes_them() -> None:
    model = HookedEncoderDecoder.from_pretrained("tiny", hf_model=reference(first("t5")))

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 4]

    with pytest.raises(
        TypeError, match=r"ablate supports models with one stack of layers.*patching.sweep.*decoder_input="
    ):
        patching.ablate(model, IDS, metric=metric)
    found = patching.sweep(
        model, IDS, IDS + 1, metric=metric, sites="encoder.resid_pre", layers=[0], decoder_input=IDS, progress=False
    )
    assert found.about["whole_forwards"] == "each cell is one: a HookedEncoderDecoder is not a causal decoder"
    changed = torch.stack([torch.where(torch.arange(5) == pos, IDS + 1, IDS)[0] for pos in range(5)])
    assert_close(found.values.flatten(), metric(model(changed, IDS.expand(5, -1))))  # the stream at first is the tokens


def test_latent_attention_says_which_weights_it_has() -> None:
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(first("deepseek_v3")))
    with pytest.raises(ValueError, match=r"no W_K \(it has .*W_UK"):
        _ = model.W_K


def test_an_expert_that_there_is_not() -> None:
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(first("mixtral")))
    for wrong in (-1, 99):
        hook = ("blocks.0.mlp.hook_expert_indices", lambda value, hook, wrong=wrong: torch.full_like(value, wrong))
        with pytest.raises(ValueError, match=r"hook_expert_indices contains .*indices of experts are 0 to"):
            model.run_with_hooks(IDS, fwd_hooks=[hook])


def test_the_checkpoint_says_what_ends_a_text() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, eos_token_id=[3, 4]))
    model = HookedTransformer.from_pretrained("tiny", hf_model=theirs)
    assert model.cfg.eos_token_id == [3, 4]
    out = model.generate(IDS[:, :2], 40, stop_at_eos=True, temperature=5.0, seed=0, verbose=False)
    assert {3, 4} & set(out[0, 2:].tolist())
    assert out.shape[1] < 42


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "bloom", "falcon", "codegen", "gpt_bigcode", "persimmon", "phi3"]
)
def test_projections_are_one_product_without_a_copy(family: str, tmp_path: Path) -> None:
    """However a file keeps the weights of heads among others."""
    reference(first(family)).save_pretrained(tmp_path)
    for block in pretrained.from_pretrained_no_processing(tmp_path).blocks:
        for weight in (block.attn.W_Q, block.attn.W_K, block.attn.W_V):
            assert weight.transpose(1, 2).flatten(0, 1).data_ptr() == weight.data_ptr()
