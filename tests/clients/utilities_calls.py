"""The same calls of helpers, evals and training, for whichever package is found under the name `transformer_lens`.

`python utilities_calls.py FOLDER FILE` makes them with the original in FOLDER, on our models, and leaves the answers in FILE.
"""

import contextlib
import io
import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

import numpy as np
import torch
from torch import Tensor

Answers = dict[str, Any]
compiled = runpy.run_path(str(Path(__file__).parents[1] / "compat" / "compiled.py"))["compiled"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, high: int = 1000) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def said(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What a call prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call(*arguments, **options)
    return out.getvalue()


def tensors() -> Answers:
    from transformer_lens import FactoredMatrix, utilities

    lower, ordered = drawn(4, 4).tril(), drawn(4, 5).sort(0).values
    counted = torch.arange(1.0, 10.0).view(3, 3)
    lowered = counted.clone()
    lowered[2, 0] = 0.0
    names = [("k6",), ("pre", 2), ("scale4ln1",), ("normalized", 27, "ln2"), ("embed",), ("resid_post", 3), ("attn", 1)]
    left, right = FactoredMatrix(drawn(3, 8, 2), drawn(3, 2, 8, seed=1)), FactoredMatrix(drawn(2, 8, 4), drawn(2, 4, 8))
    slices = [utilities.Slice(x) for x in ((1, 5), (0, 8, 2), [1, 4], 3)]
    return {
        "transpose": utilities.transpose(drawn(2, 3, 4)),
        "squares": [utilities.is_square(x) for x in (lower, ordered, drawn(2, 2, 2))],
        "lower": [utilities.is_lower_triangular(x) for x in (lower, lower.T, ordered)],
        "sums": [utilities.get_cumsum_along_dim(drawn(3, 4), 1, reverse=back) for back in (False, True)],
        "prefix": utilities.filter_dict_by_prefix({"h.1.a": 1, "h.10.a": 2, "h.1": 3}, "h.1"),
        "matrix corner": utilities.get_matrix_corner(left, 2),
        "corner": utilities.get_corner(drawn(5, 5, 5), 2),
        "structure": [
            said(utilities.check_structure, counted, x) for x in (2 * counted, lowered, lowered.T.contiguous())
        ],
        "batch of one": [utilities.remove_batch_dim(drawn(n, 2)) for n in (1, 2)],
        "numpy": [utilities.to_numpy(x) for x in (drawn(3), [1, 2], 3, torch.ones(2, dtype=torch.bfloat16))],
        "positions": utilities.get_offset_position_ids(2, torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])),
        "heads": utilities.repeat_along_head_dimension(drawn(2, 3, 4), 5),
        "composition": [utilities.composition_scores(left, right), utilities.composition_scores(left, left, False)],
        "sites": [utilities.get_act_name(*name) for name in names],
        "slices": [x.apply(drawn(2, 8), 1) for x in slices] + [x.indices(8) for x in slices],
        "loss": [
            utilities.lm_cross_entropy_loss(drawn(2, 5, 9), ids(2, 5, high=9), mask, per_token)
            for per_token in (False, True)
            for mask in (None, torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]))
        ],
        "accuracy": [utilities.lm_accuracy(drawn(2, 5, 3), ids(2, 5, high=3), each) for each in (False, True)],
        "greedy": utilities.sample_logits(drawn(4, 9), temperature=0.0),
        "one of one": utilities.sample_logits(drawn(4, 9), top_k=1),
        "one of few": utilities.sample_logits(drawn(4, 9), top_p=1e-6),
        "repetition": [
            utilities.sample_logits(drawn(4, 9), temperature=0.0, repetition_penalty=p, tokens=ids(4, 6, high=9))
            for p in (1.0, 1.5, 20.0)
        ],
        "penalty": utilities.sample_logits(drawn(2, 9), top_k=1, freq_penalty=9.0, tokens=ids(2, 6, high=9)),
    }


def numbers() -> Answers:
    from transformer_lens import utilities
    from transformer_lens.utilities import activation_functions, addmm, attention

    x, w, b = drawn(2, 3, 4), drawn(6, 4, 5, seed=1), drawn(6, 5, seed=2)
    fills: Answers = {}
    for name in ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"):
        fill = getattr(utilities, f"init_{name}_")
        settings: list[Answers] = [{}, {"gain": 2.0}]
        if "kaiming" in name:
            settings += [{"mode": "fan_out"}, {"nonlinearity": "linear"}, {"nonlinearity": "leaky_relu", "a": 3.0}]
        for shape in ((7,), (5, 7), (3, 5, 7)):
            for options in settings:
                torch.manual_seed(0)
                fills[f"{name} {shape} {options}"] = fill(torch.zeros(shape), **options)
    known = ("solu", "solu_ln", "gelu_new", "gelu_fast", "silu", "relu", "gelu", "gelu_pytorch_tanh", "xielu", "relu2")
    return fills | {
        "fans": [utilities.calc_fan_in_and_fan_out(drawn(*shape)) for shape in ((7,), (5, 7), (3, 5, 7))],
        "activations": [activation_functions.SUPPORTED_ACTIVATIONS[name](5 * x) for name in known],
        "trained": [activation_functions.XIELU(*given)(5 * x) for given in ((), (1.5, 0.9, 0.2))],
        "caps": [activation_functions.apply_softcap(50 * x, cap) for cap in (None, -1.0, 20.0)],
        "addmm": [addmm.vanilla_addmm(b[0], x[0], w[0]), addmm.batch_addmm(b[0], w[0], x)],
        "heads": [
            attention.simple_attn_linear(x, w, b),
            attention.complex_attn_linear(drawn(2, 3, 6, 4), w, b),
            *attention.clamp_qkv(x, x, x, 0.5),
        ],
    }


def texts(model: Any) -> Answers:
    import datasets
    from transformer_lens import utilities

    tokenizer = model.saved_tokenizer  # the checkpoint's, under both names
    rows = [f"Mary and John went to the {place}." for place in ("store", "park", "school")] * 20
    data = datasets.Dataset.from_dict({"text": rows, "number": list(range(60))})
    tokens = torch.tensor([[3, 3, 1, 5, 6], [1, 5, 6, 7, 8]])
    sizes = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "padding_side": "left",
        "__len__": lambda self: 10,
    }
    padded = SimpleNamespace(**sizes, __call__=print, decode=print)  # of a tokenizer, what is read here
    with_bos = utilities.get_tokenizer_with_bos(tokenizer)
    table = utilities.logits_to_df(drawn(20), tokenizer, 5)
    return {
        "bos": [with_bos.encode("Mary went"), tokenizer.encode("Mary went")],
        "by hand": [utilities.get_input_with_manually_prepended_bos("<s>", x) for x in ("a", ["a", "b"])],
        "bos removed": utilities.get_tokens_with_bos_removed(padded, tokens),
        "column": utilities.keep_single_column(data, "text").column_names,
        "rows": [
            np.stack([row["tokens"].numpy() for row in found])
            for found in (
                utilities.tokenize_and_concatenate(data, tokenizer, max_length=16, num_proc=None),
                utilities.tokenize_and_concatenate(data, tokenizer, max_length=16, num_proc=None, add_bos_token=False),
            )
        ],
        "lists": utilities.tokenize_and_concatenate(data, tokenizer, max_length=16, num_proc=None, set_format=False)[0],
        "table": {name: table[name].tolist() for name in table},
    }


def machines() -> Answers:
    from transformer_lens import utilities
    from transformer_lens.utilities import architectures, multi_gpu

    configs = [
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["T5Model"], "is_encoder_decoder": True},
        {"original_architecture": "BertForMaskedLM"},
        {"architectures": ["LlavaForConditionalGeneration"]},
        {"architectures": ["HubertForCTC"]},
    ]
    cfg = SimpleNamespace(device="cuda", n_layers=62, n_devices=8)
    rotary = [{}, {"rotary_pct": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
    return {
        "blocks": [str(utilities.get_device_for_block_index(layer, cfg)) for layer in range(62)],
        "best": str(utilities.get_best_available_device(SimpleNamespace(device="cpu", n_devices=1))),
        "sorted": utilities.sort_devices_based_on_available_memory([(0, 2), (1, 7), (2, 5)]),
        "map": [utilities.resolve_device_map(1, None, None), utilities.resolve_device_map(None, {"": 0}, None)],
        "mixed": [multi_gpu.is_mixed_cpu_gpu(places) for places in ([0, "cpu"], ["cuda:0", 1], ["cpu"])],
        "spread": utilities.count_unique_devices(SimpleNamespace(hf_device_map={"a": 0, "b": 1, "c": 0})),
        "kinds": [architectures.classify_model_config(SimpleNamespace(**config)) for config in configs],
        "named": [architectures.get_architectures_for_config(SimpleNamespace(**config)) for config in configs],
        "rotary": [utilities.get_rotary_pct_from_config(SimpleNamespace(**config)) for config in rotary],
        "libraries": [utilities.is_library_available(name) for name in ("torch", "no_such_library")],
        "arguments": utilities.select_compatible_kwargs({"a": 1, "b": 2}, lambda a, c: None),
        "flags": [utilities.override_or_use_default_value(True, given) for given in (None, False)],
    }


def programs() -> Answers:
    """What Tracr compiled, as a config, as weights, and as the logits of a model of these."""
    import transformer_lens
    from transformer_lens.utilities import tracr

    model = compiled()
    cfg = tracr.make_tracr_transformer_bridge_config(model)
    if "shim" in str(transformer_lens.__file__):
        made = transformer_lens.HookedTransformer(cfg)
    else:
        made = transformer_lens.model_bridge.TransformerBridge.boot_native(cfg)
    state = tracr.make_tracr_transformer_bridge_state_dict(model)
    made.load_state_dict(state, strict=False)  # theirs has parts under several names, of which it gives one
    names = ("n_layers", "d_model", "d_head", "n_heads", "n_ctx", "d_vocab", "d_vocab_out", "d_mlp", "act_fn")
    return {name: getattr(cfg, name) for name in (*names, "attention_dir", "normalization_type")} | {
        "label": tracr.infer_tracr_output_label(model),
        "unembed": tracr.make_tracr_categorical_unembed(model),
        "logits": made(torch.tensor([[2, 0, 1, 1, 3]])).detach(),
    }


@contextlib.contextmanager
def fixed_tokens(tokens: Tensor) -> Iterator[None]:
    """Random integers are these: the original and we draw from different generators."""
    whole = torch.randint
    torch.randint = lambda *shape, **options: tokens.clone()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randint = whole


def evaluations(model: Any) -> Answers:
    from transformer_lens import evals

    batches = [{"tokens": batch} for batch in ids(4, 2, 12)]
    names, pattern = ["Mary", "John", "Alice"], "[A] and [B] went to the [PLACE]. [B] gave a drink to [A]"
    settings = {"templates": [pattern], "names": names, "nouns": {"PLACE": ["store", "park"]}}
    data = evals.IOIDataset(model.tokenizer, num_samples=9, seed=0, **settings)
    items = [data[i] for i in range(9)]
    fixed = [{"prompt": ids(9)[: 7 + i], "IO": ids(9)[6 + i : 7 + i], "S": torch.tensor([5])} for i in (0, 1, 2)]
    once = ids(3, 20)
    if "shim" in str(evals.__file__):  # ours draws places among the ordinary tokens
        ordinary = [token for token in range(len(model.tokenizer)) if token not in model.tokenizer.all_special_ids]
        once = torch.tensor([[ordinary.index(token) for token in row] for row in once.tolist()])
    with fixed_tokens(once):
        induction = [
            evals.induction_loss(model, batch_size=3, subseq_len=20, prepend_bos=bos, device="cpu")
            for bos in (None, False)
        ]
    return {
        "induction": induction,
        "mean": evals.evaluate_on_dataset(model, batches, device="cpu"),
        "item": [{name: value.dtype is torch.long for name, value in item.items()} for item in items],
        "beginnings": [item["prompt"][0].item() for item in items],
        "number": [len(evals.IOIDataset(model.tokenizer, num_samples=n, symmetric=True)) for n in (6, 7)],
        "keys": sorted(data.samples[0]),
        "receivers": evals.ioi_eval(model, fixed, batch_size=2),
        "names": evals.DATASET_NAMES,
        "loaders": [loader.__name__ for loader in evals.DATASET_LOADERS],
        "questions": [len(evals.MMLU_SUBJECTS), sorted(evals.MMLU_SUBJECTS)],
    }


def small() -> Any:
    from hooked_lm import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 1, "d_model": 16, "n_ctx": 8, "d_head": 8, "n_heads": 2, "d_vocab": 10, "d_mlp": 32}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="relu", seed=0, device="cpu"))


def training() -> Answers:
    from transformer_lens.train import HookedTransformerTrainConfig, train

    rows = [{"tokens": row} for row in ids(16, 8, high=10)]
    every: Answers = {"num_epochs": 3, "batch_size": 16, "lr": 0.01, "print_every": None, "device": "cpu"}
    found: Answers = {}
    for options in (
        {},
        {"optimizer_name": "AdamW"},
        {"weight_decay": 0.5},
        {"optimizer_name": "SGD", "momentum": 0.9, "weight_decay": 0.1, "lr": 0.1},
        {"optimizer_name": "SGD", "max_grad_norm": 0.1, "lr": 1.0},
        {"optimizer_name": "SGD", "warmup_steps": 4, "lr": 1.0},
    ):
        model = train(small(), HookedTransformerTrainConfig(**every | options), rows)
        found[str(options)] = model(torch.stack([row["tokens"] for row in rows])).detach()
    with tempfile.TemporaryDirectory() as folder:
        saving = every | {"num_epochs": 1, "batch_size": 4, "save_every": 2, "save_dir": folder}
        train(small(), HookedTransformerTrainConfig(**saving), rows)
        found["saved"] = sorted(path.name for path in Path(folder).iterdir())
    return found


def differences(model: Any) -> Answers:
    """What the original does otherwise."""
    from huggingface_hub import hf_hub_download
    from transformer_lens import evals, utilities
    from transformer_lens.train import HookedTransformerTrainConfig, train

    rows = [{"tokens": row} for row in ids(16, 8, high=10)]
    trained, steps = small(), []
    trained.register_forward_pre_hook(lambda module, arguments: steps.append(1))
    every: Answers = {"batch_size": 4, "print_every": None, "device": "cpu"}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    train(trained, HookedTransformerTrainConfig(num_epochs=1, max_steps=2, **every), rows)
    seeded = not torch.equal(torch.get_rng_state(), state)
    with tempfile.TemporaryDirectory() as folder:
        train(small(), HookedTransformerTrainConfig(num_epochs=2, save_every=3, save_dir=folder, **every), rows)
        saved = sorted(path.name for path in Path(folder).iterdir())
    batches = [{"tokens": batch} for batch in ids(6, 2, 12)]
    read: list[int] = []
    watched = (read.append(1) or batch for batch in batches)  # type: ignore[func-returns-value]
    evals.evaluate_on_dataset(model, watched, truncate=2, device="cpu")
    with_bos = utilities.get_tokenizer_with_bos(model.tokenizer)
    sentence = evals.IOIDataset(with_bos, num_samples=1, seed=0)[0]
    lower = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    return {
        "steps of max_steps=2": len(steps),
        "the process's seed is changed": seeded,
        "checkpoints of two epochs": saved,
        "losses of truncate=2": len(read),
        "options for the hub": sorted(
            utilities.select_compatible_kwargs({"revision": "r", "token": None, "colour": 1}, hf_hub_download)
        ),
        "BOS in a sentence": int((sentence["prompt"] == with_bos.bos_token_id).sum()),
        "BOS in a name": int((sentence["IO"] == with_bos.bos_token_id).sum()),
        "rows and columns": said(utilities.check_structure, lower, -lower),
    }


def answers() -> Answers:
    from hooked_lm import HookedTransformer

    model = HookedTransformer.from_pretrained("demo")
    return {
        "tensors": tensors(),
        "numbers": numbers(),
        "texts": texts(model),
        "machines": machines(),
        "programs": programs(),
        "evaluations": evaluations(model),
        "training": training(),
        "differences": differences(model),
    }


def plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(plain(answers())))
