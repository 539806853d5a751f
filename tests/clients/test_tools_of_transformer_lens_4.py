"""TransformerLens 4.3's own tools, which take any model with the methods that they need: ours as they are.

They run in a process of their own (`tools_of_4.py`), in which that package is `transformer_lens`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis.reading import head_detector
from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter
from tests.close import assert_close

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = Path(sys.prefix) / "transformer-lens-4.3.0"
spec = importlib.util.spec_from_file_location("asked_of_4", HERE / "asked_of_4.py")
assert spec is not None
assert spec.loader is not None
asked = importlib.util.module_from_spec(spec)
spec.loader.exec_module(asked)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("theirs")
    command = [sys.executable, "-W", "ignore", str(HERE / "tools_of_4.py"), str(FOLDER), str(out)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=False) for path in out.glob("*.pt")}


@pytest.fixture(scope="module")
def ours() -> dict[str, tuple[HookedTransformer, Tensor, Tensor]]:
    return asked.models()


Models = dict[str, tuple[HookedTransformer, Tensor, Tensor]]


def same(found: Any, expected: Any, scale: Tensor | None = None) -> None:
    assert_close(torch.as_tensor(found), expected, scale=scale)


@pytest.mark.parametrize("family", asked.FAMILIES)
@pytest.mark.parametrize("sweep", asked.SWEEPS)
def test_sweeps(theirs: dict[str, Any], ours: Models, family: str, sweep: str) -> None:
    model, clean, corrupted = ours[family]
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        expected = getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, cache, asked.metric)
    same(theirs[family]["sweeps"][sweep], expected)
    assert expected.std() > 1e-3, "it matters what is patched"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("component", asked.COMPONENTS)
def test_direct_paths(theirs: dict[str, Any], ours: Models, family: str, component: str) -> None:
    """From head 0.1 to the queries, keys or values of one later head; by hand with the heads' own inputs."""
    model, clean, corrupted = ours[family]
    with torch.no_grad():
        z = [model.run_with_cache(tokens)[1]["z", 0][:, :, 1] for tokens in (clean, corrupted)]
        moved = (z[0] - z[1]) @ model.W_O[0, 1]
        for head in range(model.cfg.n_heads):

            def hook(value: Tensor, hook: Any, head: int = head) -> Tensor:
                value[:, :, head] += moved
                return value

            logits = model.run_with_hooks(corrupted, fwd_hooks=[(f"blocks.1.hook_{component}_input", hook)])
            same(theirs[family]["direct"][component][1, head], asked.metric(logits), scale=logits)
            assert (asked.metric(logits) - asked.metric(model(corrupted))).abs() > 1e-5
    assert theirs[family]["direct"][component][0].eq(0).all()


@pytest.mark.parametrize("family", asked.FAMILIES)
def test_their_cache_reads_ours(theirs: dict[str, Any], ours: Models, family: str) -> None:
    model, clean, _ = ours[family]
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
        expected = asked.readings(cache)
    found = theirs[family]["read"]
    assert found.pop("labels") == expected.pop("labels")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same(found[name], value)
        assert value.std() > 1e-3, name


@pytest.mark.parametrize("which", asked.SINGULAR)
def test_singular_vectors(theirs: dict[str, Any], which: str) -> None:
    """Of a product of weights and of an MLP's; directions are known up to their sign."""
    found = theirs["demo"]["singular"][which].detach()
    expected = SVDInterpreter(asked.demo()).get_singular_vectors(which, 1, num_vectors=3, head_index=1).detach()
    same(found.abs(), expected.abs())
    assert expected.std() > 0.05


def test_heads_are_detected(theirs: dict[str, Any]) -> None:
    model = asked.demo()
    for (pattern, *given), found in theirs["demo"]["heads"].items():
        expected = head_detector.detect_head(model, asked.TEXT, pattern, **asked.options(given))
        assert (found - expected).abs().max() < 0.00051, "one of the measures is rounded to three places"
    assert theirs["demo"]["heads"][("previous_token_head",)].max() > 0.5


def test_evaluations(theirs: dict[str, Any]) -> None:
    model, found = asked.demo(), theirs["demo"]["evals"]
    losses = [model(batch["tokens"], return_type="loss").item() for batch in asked.batches(model)]
    assert_close(found["evaluate_on_dataset"], sum(losses) / len(losses))
    differences = []
    for sample in found["dataset"]:
        prompt = sample["prompt"][: len(sample["prompt"]) - len(sample["IO"])]
        logits = model(prompt[None])[0, -1]
        differences.append((logits[sample["IO"][0]] - logits[sample["S"][0]]).item())
    assert len(differences) == 20
    assert_close(found["ioi_eval"]["Logit Difference"], sum(differences) / 20)
    assert found["ioi_eval"]["Accuracy"] == sum(value > 0 for value in differences) / 20 > 0.8
