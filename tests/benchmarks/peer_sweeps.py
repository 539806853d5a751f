"""The other side of the sweeps' benchmark: a process that patches with the TransformerLens it finds, one job a line.

python peer_sweeps.py THREADS     (with the Python of an environment that has transformer-lens 3 or 4, and not this project)

A job is a line of JSON on stdin, its answer a line of JSON on stdout; what the libraries print goes to stderr.
{"job": "load", "directory": ...}: a checkpoint as transformers writes it, with `flat.json` and `flat.pt`, the same model in
flat names. {"job": "sweep", "clean": ids, "corrupted": ids, "answers": [a, b], "cells": {function of patching: cells}}: where
cells are null the function runs over its whole grid; the answer has the values of every cell and the seconds that it took.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformer_lens.patching

SITES = ("hook_resid_pre", "hook_z", "hook_attn_out", "hook_mlp_out")


def classic(directory: Path) -> Any:
    """A HookedTransformer, from flat names."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    flat = json.loads((directory / "flat.json").read_text())
    model = HookedTransformer(HookedTransformerConfig(**flat, init_weights=False, device="cpu"))
    weights = torch.load(directory / "flat.pt", weights_only=True)
    if flat["n_key_value_heads"] not in (None, flat["n_heads"]):
        weights = {
            name.replace("attn.W_K", "attn._W_K").replace("attn.W_V", "attn._W_V"): w for name, w in weights.items()
        }
    lacking, unknown = model.load_state_dict(weights, strict=False)
    if unknown or (lacking := [name for name in lacking if name.split(".")[-1].strip("_").startswith(("W", "w"))]):
        raise ValueError(f"weights that it lacks: {lacking}; that it does not know: {unknown}")
    return model


def bridge(directory: Path) -> Any:
    """A TransformerBridge, as fast as from boot_transformers and in compatibility mode; that one wants a tokenizer as well."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


def sweep(model: Any, clean: Any, corrupted: Any, answers: Any, cells: dict[str, Any]) -> dict[str, Any]:
    """The values of the cells that are asked for, in order, and the seconds each took: from one metric to the next."""
    right, wrong = answers
    _, cache = model.run_with_cache(torch.tensor(clean), names_filter=lambda name: name.endswith(SITES))
    ends: list[float] = []

    def metric(logits: torch.Tensor) -> torch.Tensor:
        if len(logits) == 1:
            value = logits[0, -1, right] - logits[0, -1, wrong]
        else:
            value = (logits[:, -1, right] - logits[:, -1, wrong]).mean()
        ends.append(time.perf_counter())
        return value

    values: list[float] = []
    seconds: list[float] = []
    for name, wanted in cells.items():
        function = getattr(transformer_lens.patching, name)
        asked = {}
        if wanted is not None:
            asked = {"index_df": pd.DataFrame(wanted, columns=["layer", "other"]), "index_axis_names": None}
        ends.clear()
        start = time.perf_counter()
        values += function(model, torch.tensor(corrupted), cache, metric, **asked).flatten().tolist()
        seconds += [after - before for before, after in zip([start, *ends], ends, strict=False)]
    return {"values": values, "seconds": seconds}


def main(threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    load = classic if version("transformer-lens").startswith("3.") else bridge
    model: Any = None
    for line in sys.stdin:
        job = json.loads(line)
        kind = job.pop("job")
        if kind == "load":
            model = None  # before the next is there
            model, answer = load(Path(job["directory"])), {"loaded": True}
        else:
            answer = sweep(model, **job)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
