"""The original, `transformer_lens` 3.9.0, beside ours in one process, with the same weights in both.

`pair(name)` is a tiny Hugging Face model of random weights (biases and norms too) as either library loads it, or a toy model
whose weights went from theirs into ours as a state dict. The original finds its config in a folder with a `config.json`; a family
that it knows by the names of its released checkpoints alone (Gemma 2) is described in flat names here.
"""

import copy
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hooked_lm
from hooked_lm import pretrained
from tests import close

HOME = Path(sys.prefix) / "transformer-lens-3.9.0"
sys.path.insert(0, str(HOME))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformer_lens
    import transformer_lens.utils
    from transformer_lens import loading_from_pretrained
    from transformer_lens.pretrained.weight_conversions import convert_gemma_weights
assert HOME in Path(transformer_lens.__file__).parents, "this is not the original"

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None, "rms_norm_eps": 0.02}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "n_ctx": 40,
    "layer_norm_epsilon": 0.05,
}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_positions": 40}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
GEMMA2 = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GROUPED, **GEMMA2, final_logit_softcapping=4.0)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, **MIXTRAL)),
    "bert": lambda: transformers.BertForPreTraining(
        transformers.BertConfig(**SIZES, pad_token_id=0, layer_norm_eps=0.05, architectures=["BertForMaskedLM"])
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
}
FLAT_GEMMA2 = {
    "d_model": 32,
    "d_head": 8,
    "n_heads": 4,
    "d_mlp": 48,
    "n_layers": 2,
    "n_ctx": 40,
    "eps": 0.02,
    "d_vocab": 61,
    "act_fn": "gelu_pytorch_tanh",
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "n_key_value_heads": 2,
    "window_size": 4,
    "use_local_attn": True,
    "attn_types": ["local", "global"],
    "attn_scores_soft_cap": 5.0,
    "output_logits_soft_cap": 4.0,
    "gated_mlp": True,
    "final_rms": True,
    "use_normalization_before_and_after": True,
    "original_architecture": "Gemma2ForCausalLM",
    "init_weights": False,
    "device": "cpu",
}
TOY = {
    "n_layers": 2,
    "d_model": 32,
    "n_ctx": 40,
    "d_head": 8,
    "n_heads": 4,
    "d_vocab": 61,
    "attn_only": True,
    "device": "cpu",
}
TOYS: dict[str, dict[str, Any]] = {
    "toy-ln": {**TOY, "normalization_type": "LN"},
    "toy-bare": {**TOY, "normalization_type": None},
    "toy-shortformer": {**TOY, "normalization_type": "LN", "positional_embedding_type": "shortformer"},
    "toy-solu": {**TOY, "normalization_type": "LN", "attn_only": False, "d_mlp": 48, "act_fn": "solu_ln"},
}
DECODERS = ["gpt2", "neox", "llama", "qwen2", "gemma2", "mixtral"]
OTHERS = ["bert", "t5"]
NAMES = [*DECODERS, *OTHERS, *TOYS]


@dataclass
class Pair:
    """The same model in both libraries, and what it is run on."""

    name: str
    ours: Any
    theirs: Any
    inputs: tuple[Tensor, ...]

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.theirs


def randomize(model: nn.Module) -> nn.Module:
    """Weights of order 0.25, biases and norm weights off their usual 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.25 * noise)
    return model.eval()


@cache
def hf_model(name: str) -> Any:
    return randomize(MODELS[name]())


def original_config(name: str, model: Any) -> Any:
    if name == "gemma2":
        return transformer_lens.HookedTransformerConfig.from_dict(FLAT_GEMMA2)
    config = copy.deepcopy(model.config)
    if name != "bert":
        config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="tiny") as folder:
        config.save_pretrained(folder)
        found = loading_from_pretrained.get_pretrained_model_config(folder, hf_cfg=config.to_dict(), device="cpu")
    found.tokenizer_name = None
    return found


def original(name: str, **folding: bool) -> Any:
    """The original of a Hugging Face model; folded as asked, else as it is."""
    model = hf_model(name)
    cfg = original_config(name, model)
    convert = convert_gemma_weights if name == "gemma2" else None
    state = (
        convert(model, cfg)
        if convert
        else loading_from_pretrained.get_pretrained_state_dict("gpt2", cfg, copy.deepcopy(model))
    )
    state = {key: value.clone() for key, value in state.items()}
    kind = {"bert": transformer_lens.HookedEncoder, "t5": transformer_lens.HookedEncoderDecoder}
    found = kind.get(name, transformer_lens.HookedTransformer)(cfg)
    if name in OTHERS:
        assert not found.load_state_dict(state, strict=False).unexpected_keys
    else:
        found.load_and_process_state_dict(state, **{**NOT_FOLDED, **folding})
    for parameter in found.parameters():
        parameter.requires_grad_(True)
    return found


NOT_FOLDED = dict.fromkeys(
    ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices"),
    False,
)


@cache
def pair(name: str) -> Pair:
    """A pair that tests share; whoever changes a model takes a copy."""
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    if name in TOYS:
        theirs = randomize(transformer_lens.HookedTransformer(TOYS[name]))
        ours = hooked_lm.HookedTransformer(TOYS[name])
        ours.load_state_dict(theirs.state_dict())
        return Pair(name, ours, theirs, (tokens,))
    ours = pretrained.from_pretrained_no_processing("tiny", hf_model=copy.deepcopy(hf_model(name)))
    ours.cfg.tokenizer_name = None  # there is none of this name
    targets = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(2))
    return Pair(name, ours, original(name), (tokens, targets) if name == "t5" else (tokens,))


@cache
def demo() -> Pair:
    """The bundled model, with its tokenizer."""
    folder = Path(hooked_lm.__file__).parent / "demo" / "model"
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    model.config.n_ctx = model.config.n_positions
    cfg = original_config("demo", model)
    theirs = transformer_lens.HookedTransformer(cfg, transformers.AutoTokenizer.from_pretrained(folder))
    state = loading_from_pretrained.get_pretrained_state_dict("gpt2", cfg, copy.deepcopy(model))
    theirs.load_and_process_state_dict(state, **NOT_FOLDED)
    ours = hooked_lm.HookedTransformer.from_pretrained_no_processing("demo")
    return Pair("demo", ours, theirs, (ours.to_tokens("When Mary and John went to the store, John gave a drink to"),))


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference of two tensors, or of what stands in the same places of two tuples; infinite for other shapes,
    NaNs, or labels."""
    if isinstance(ours, tuple):
        return max(map(distance, ours, theirs), default=0.0) if len(ours) == len(theirs) else float("inf")
    if not isinstance(ours, Tensor):
        return 0.0 if ours == theirs else float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    if ours.dtype in (torch.bool, torch.long):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    apart = torch.where(ours == theirs, 0, (ours - theirs).abs())  # of masked scores, too
    largest = apart.max().item() if apart.numel() else 0.0
    return float("inf") if largest != largest else largest


def assert_close(ours: Any, theirs: Any, what: Any = "", depth: float = close.MODEL, scale: Any = None) -> None:
    """Equal but for rounding; tuples part by part, and what is no tensor exactly. `scale` is the size of terms that cancel."""
    if isinstance(ours, tuple):
        assert len(ours) == len(theirs), what
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, what, depth, scale)
    elif isinstance(ours, Tensor):
        close.assert_close(ours, theirs, depth, scale, msg=str(what))
    else:
        assert ours == theirs, what
