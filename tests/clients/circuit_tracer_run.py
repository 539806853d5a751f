"""What circuit-tracer does with a model made from a config, in one dict of tensors: called here, and by itself with the original.

`python circuit_tracer_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes to OUT
what `everything` finds on each of MODELS with each of READ_AND_WRITTEN.
"""

import atexit
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
from torch import Tensor

huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = False  # newer hub versions dropped it; circuit-tracer imports it

SIZES: dict[str, Any] = {
    "n_layers": 3, "d_model": 32, "n_ctx": 24, "d_head": 8, "n_heads": 4, "d_mlp": 48, "d_vocab": 60, "device": "cpu",
    "tokenizer_name": None, "model_name": "tiny", "init_weights": False, "seed": 0,
}  # fmt: skip
ROTARY = {
    "positional_embedding_type": "rotary", "normalization_type": "RMS", "gated_mlp": True, "final_rms": True,
    "n_key_value_heads": 2, "eps": 1e-5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": dict(SIZES, act_fn="gelu_new", normalization_type="LN", original_architecture="GPT2LMHeadModel"),
    "llama": dict(SIZES, **ROTARY, act_fn="silu", original_architecture="LlamaForCausalLM"),
    "gemma2": dict(
        SIZES, **ROTARY, act_fn="gelu_pytorch_tanh", use_normalization_before_and_after=True, use_local_attn=True,
        window_size=4, attn_types=["local", "global", "local"], attn_scores_soft_cap=20.0, output_logits_soft_cap=5.0,
        original_architecture="Gemma2ForCausalLM",
    ),
}  # fmt: skip
READ_AND_WRITTEN = {
    "stream": ("hook_resid_mid", "hook_mlp_out"),
    "mlp": ("mlp.hook_in", "mlp.hook_out"),
    "norm": ("ln2.hook_normalized", "hook_mlp_out"),
}
KINDS = [
    "plain",
    "skip",
    "across",
]  # a transcoder a layer, with a skip connection, and one that writes to all later layers
PROMPT = torch.tensor([1, 7, 23, 5, 42, 11, 30])
WIDTH = 20


def tokenizer() -> Any:
    """Of sixty words, w3 to w59 and three special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    words = [*special.values(), *(f"w{i}" for i in range(3, SIZES["d_vocab"]))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = Path(tempfile.gettempdir()) / f"sixty-words-{os.getpid()}"  # the original loads it anew by its name
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return AutoTokenizer.from_pretrained(folder)


def filled(model: torch.nn.Module, scale: float = 0.3, without: tuple[str, ...] = ()) -> torch.nn.Module:
    """Weights that depend on their names alone: `_W_K` of grouped keys is `W_K` elsewhere."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.replace("._", ".").encode()))
            noise = torch.randn(weight.shape, generator=generator) * (
                0 if without and name.endswith(without) else scale
            )
            weight.copy_(1 + noise if "ln" in name and name.endswith(".w") else noise)
    return model


def transcoders(kind: str, where: str) -> Any:
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet

    read, written = READ_AND_WRITTEN[where]
    n_layers, d_model = SIZES["n_layers"], SIZES["d_model"]
    if kind == "across":
        made = CrossLayerTranscoder(
            n_layers, WIDTH, d_model, lazy_decoder=False, feature_input_hook=read, feature_output_hook=written,
            dtype=torch.float32,
        )  # fmt: skip
        return filled(made, 0.2)
    each = {
        layer: SingleLayerTranscoder(
            d_model, WIDTH, torch.nn.functional.relu, layer, skip_connection=kind == "skip", dtype=torch.float32
        )
        for layer in range(n_layers)
    }
    return filled(TranscoderSet(each, read, written), 0.2)


def replacement(name: str, kind: str, where: str) -> Any:
    from circuit_tracer import ReplacementModel
    from transformer_lens import HookedTransformerConfig

    cfg = HookedTransformerConfig.from_dict(dict(MODELS[name]))
    model = ReplacementModel.from_config(cfg, transcoders(kind, where))
    model.transcoders, kept = None, model.transcoders
    gated = model.cfg.gated_mlp  # whose b_in the original adds behind the product, and it has no b_gate
    filled(model, without=(".b_in", ".b_gate") if gated else ())
    model.transcoders = kept
    model.tokenizer = tokenizer()
    return model


def everything(model: Any) -> dict[str, Tensor]:
    """Values by name."""
    from circuit_tracer import attribute
    from circuit_tracer.attribution.targets import CustomTarget
    from circuit_tracer.graph import compute_graph_scores, prune_graph

    found: dict[str, Tensor] = {"plain": model(PROMPT[None])}
    with model.zero_softcap():
        found["without soft cap"] = model(PROMPT[None])
    found["activations' logits"], found["activations"] = model.get_activations(PROMPT)
    found["sparse"] = model.get_activations(PROMPT, sparse=True, apply_activation_function=False)[1].to_dense()
    direction = torch.linspace(-1, 1, SIZES["d_model"])
    targets = {
        "salient": {},
        "few": {"max_feature_nodes": 20, "max_n_logits": 3, "update_interval": 1},
        "tokens": {"attribution_targets": torch.tensor([4, 9])},
        "custom": {"attribution_targets": [CustomTarget("direction", 0.5, direction)]},
        "offloaded": {"offload": "cpu", "max_n_logits": 2},
    }
    graphs = {name: attribute(PROMPT, model, batch_size=16, **options) for name, options in targets.items()}
    for name, graph in graphs.items():
        found |= {
            f"{name}: edges": graph.adjacency_matrix, f"{name}: features": graph.active_features,
            f"{name}: values": graph.activation_values, f"{name}: probabilities": graph.logit_probabilities,
            f"{name}: chosen": graph.selected_features,
            f"{name}: scores": torch.tensor(compute_graph_scores(graph)),
        }  # fmt: skip
    pruned = prune_graph(graphs["salient"])
    found |= {"pruned nodes": pruned.node_mask, "pruned scores": pruned.cumulative_scores}
    return found | interventions(model, found["activations"])


def interventions(model: Any, features: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    layers = range(model.cfg.n_layers)
    changes = [(0, 2, 3, 4.0), (1, slice(3, None), 5, -2.0), (1, 6, torch.tensor(1), features[1, 6, 1] + 1)]
    options: dict[str, dict[str, Any]] = {
        "frozen": {},
        "free": {"freeze_attention": False},
        "constrained": {"constrained_layers": layers},
        "partly": {"constrained_layers": range(2), "apply_activation_function": False},
        "sparse": {"sparse": True},
    }
    for name, how in options.items():
        logits, after = model.feature_intervention(PROMPT, changes, **how)
        found[f"{name}: logits"] = logits
        found[f"{name}: features"] = after.to_dense() if after.is_sparse else after
    found["silent: logits"], _ = model.feature_intervention(PROMPT, changes, return_activations=False)
    found["nothing: logits"], _ = model.feature_intervention(PROMPT, [])
    greedy = {"do_sample": False, "max_new_tokens": 4, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    tokens, logits, after = model.feature_intervention_generate(PROMPT[None], changes, **greedy)
    return found | {"generated": tokens, "generated: logits": logits, "generated: features": after}


def cases() -> list[tuple[str, str, str]]:
    """Every model with every place, and every kind of transcoder in one of them."""
    return [(name, kind, where) for name in MODELS for kind in KINDS for where in READ_AND_WRITTEN
            if kind == "plain" or where == "stream"]  # fmt: skip


def results(name: str, kind: str, where: str) -> dict[str, Tensor]:
    model = replacement(name, kind, where)
    return {key: value.detach().clone().contiguous() for key, value in everything(model).items()}


def main(folder: str, out: Path) -> None:
    sys.path.insert(0, folder)
    from safetensors.torch import save_file

    save_file({f"{'/'.join(case)}/{key}": value for case in cases() for key, value in results(*case).items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
