"""Run in a process of its own: TransformerLens 4.3 itself, first on the path, and its tools on models of ours as they are.

`python tools_of_4.py FOLDER OUT` writes what each tool gives to OUT: `{case}.pt`, {name of the tool: what it gave}.
"""

import sys
from pathlib import Path
from typing import Any

FOLDER, OUT = sys.argv[1:]
sys.path.insert(0, FOLDER)

import asked_of_4 as asked  # noqa: E402  (beside this file)
import torch  # noqa: E402
import transformer_lens as lens  # noqa: E402
from transformer_lens import evals, head_detector, patching  # noqa: E402
from transformer_lens.model_protocol import (  # noqa: E402
    TrainableTransformerLensModel,
    TransformerLensModel,
    TransformerLensModelWithWeights,
)

PROTOCOLS = (TransformerLensModel, TransformerLensModelWithWeights, TrainableTransformerLensModel)


def sweeps(model: Any, clean: Any, corrupted: Any) -> dict[str, Any]:
    _, cache = model.run_with_cache(clean)
    found = {}
    for name in asked.SWEEPS:
        sweep = getattr(patching, f"get_act_patch_{name}")
        result = sweep(model, corrupted, lens.ActivationCache(cache.cache_dict, model), asked.metric)
        found[name] = result if isinstance(result, torch.Tensor) else result.values
    return found


def direct_paths(model: Any, clean: Any, corrupted: Any) -> dict[str, Any]:
    caches = [lens.ActivationCache(model.run_with_cache(tokens)[1].cache_dict, model) for tokens in (clean, corrupted)]
    return {
        component: patching.get_act_patch_direct_path(
            model, corrupted, *caches, asked.metric, 0, 1, component, verbose=False
        )
        for component in asked.COMPONENTS
    }


def read(model: Any, tokens: Any) -> dict[str, Any]:
    _, cache = model.run_with_cache(tokens)
    return asked.readings(lens.ActivationCache(cache.cache_dict, model))


def main() -> None:
    for name, (model, clean, corrupted) in asked.models().items():
        assert all(isinstance(model, protocol) for protocol in PROTOCOLS)
        found = {"sweeps": sweeps(model, clean, corrupted), "read": read(model, clean)}
        found["direct"] = direct_paths(model, clean, corrupted)
        torch.save(found, Path(OUT) / f"{name}.pt")
    model = asked.demo()
    heads = {  # by pattern and options
        (pattern, *given): head_detector.detect_head(model, asked.TEXT, pattern, **asked.options(given))
        for pattern in head_detector.HEAD_NAMES
        for given in asked.DETECTIONS
    }
    dataset = evals.IOIDataset(model.tokenizer, [asked.TEMPLATE], asked.NAMES, num_samples=20, seed=0)
    told = {
        "evaluate_on_dataset": evals.evaluate_on_dataset(model, asked.batches(model), device="cpu"),
        "ioi_eval": evals.ioi_eval(model, dataset),
        "dataset": [dataset[n] for n in range(len(dataset))],
        "texts": dataset.samples,
    }
    vectors = lens.SVDInterpreter(model).get_singular_vectors
    singular = {which: vectors(which, 1, num_vectors=3, head_index=1) for which in asked.SINGULAR}
    torch.save({"heads": heads, "evals": told, "singular": singular}, Path(OUT) / "demo.pt")


main()
