"""Train the transcoders of the demonstration model that ship with hooked_lm, and measure them.

    python demos/train_demo_transcoders.py --out hooked_lm/demo

Two files for the four MLPs of the bundled model, on texts of `hooked_lm.demo.corpus`: a transcoder for each layer
(`transcoders.safetensors`), and a cross-layer transcoder (`cross_layer_transcoder.safetensors`). Both are BatchTopK, which is
JumpReLU after training; matrices are stored in bfloat16. `transcoders.json` has their figures on held-out texts, beside those of
random and of PCA transcoders, of the best linear map, and of transcoders trained in the same way on the untrained twin of
the model; and, if both were trained, those of attribution graphs of six prompts, of features and of neurons. Two to three
minutes on one CPU thread for each of the four.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribution_graph
from hooked_lm.demo.corpus import training_text
from hooked_lm.demo.tasks import pairs
from hooked_lm.interventions.dictionaries import (
    ActivationBatches,
    Activations,
    BatchTopK,
    LayerTranscoders,
    TrainingConfig,
    evaluate_dictionary,
    train_on,
)  # fmt: skip

READ, WRITTEN, SKIP = "mlp.hook_in", "hook_mlp_out", 1
FILES = {False: "transcoders.safetensors", True: "cross_layer_transcoder.safetensors"}
TWIN = "untrained twin"
NAMES = {False: "demo", True: "demo-cross-layer"}


def vectors(model: HookedTransformer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """The inputs and outputs of all MLPs, [row, layer, width]."""
    layers = range(model.cfg.n_layers)
    reads, writes = ([(site, layer) for layer in layers] for site in (READ, WRITTEN))
    stream = Activations(model, texts, reads, writes, skip=SKIP)
    parts = [stream.vectors(range(start, min(start + 64, len(texts)))) for start in range(0, len(texts), 64)]
    read, written = zip(*parts, strict=True)
    return torch.cat(read), torch.cat(written)


def trained(
    model: HookedTransformer, data: ActivationBatches, across: bool, options: argparse.Namespace
) -> LayerTranscoders:
    """Trained transcoders, as they are stored."""
    each = tuple(
        BatchTopK.Config(
            model.cfg.d_model, options.width, subtract_b_dec=False, k=options.k,
            hook_point=f"blocks.{layer}.{READ}", hook_point_out=f"blocks.{layer}.{WRITTEN}",
        )
        for layer in range(model.cfg.n_layers)
    )  # fmt: skip
    settings = TrainingConfig(
        options.steps, options.batch, options.learning_rate, dead_after=5_000, resample_after=20_000, seed=options.seed
    )
    start = time.process_time()
    found = train_on(data, LayerTranscoders.Config(each, across), settings).sae
    print(f"{type(found).__name__}: {options.steps:,} steps in {time.process_time() - start:.0f} seconds of CPU time")
    for weight in found.parameters():
        if weight.ndim == 2:
            weight.data = weight.data.bfloat16().float()
    return found


def linear(data: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> list[float]:
    """The variance of held-out outputs that the best linear map of the inputs explains, for each layer and for all."""
    errors, totals = [], []
    for layer in range(data[0].shape[1]):
        (x, y), (new_x, new_y) = ([values[:, layer].double() for values in pair] for pair in (data, held_out))
        W = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0)).solution
        errors.append((new_y - y.mean(0) - (new_x - x.mean(0)) @ W).pow(2).sum().item())
        totals.append((new_y - new_y.mean(0)).pow(2).sum().item())
    each = [1 - error / total for error, total in zip(errors, totals, strict=True)]
    return [round(value, 3) for value in (*each, 1 - sum(errors) / sum(totals))]


def measured(model: HookedTransformer, texts: list[str], transcoders: LayerTranscoders) -> dict[str, Any]:
    """The figures by layer, and those of all layers at once last."""
    found = evaluate_dictionary(model, texts, transcoders, skip=SKIP)
    print(found)
    of = {"figures": found.mean, **found.floors}
    names = found.axes["figure"]
    return {
        who: {name: [round(v, 4) for v in values[i].tolist()] for i, name in enumerate(names)}
        for who, values in of.items()
    }


def graphs(
    model: HookedTransformer, own: LayerTranscoders | None, of_twin: LayerTranscoders | None, n_prompts: int = 6
) -> dict[str, float]:
    """The means of attribution graphs of prompts with indirect objects, beside those of the untrained twin."""
    task, found = pairs("indirect_object", n_prompts, model=model), []
    for prompt, *answers in zip(task.clean, task.answers, task.wrong_answers, strict=True):
        graph = attribution_graph(
            model,
            prompt,
            own,
            answers=tuple(answers),
            max_nodes=500,
            check=30,
            control=of_twin or "untrained",
            progress=False,
        )
        found.append({
            "correlation": graph.agreement.correlation["correlation"],
            "correlation, placebo": graph.agreement.placebo_correlation["correlation"],
            f"correlation, {TWIN}": graph.control["correlation"],
            "replacement": graph.scores["replacement"],
            f"replacement, {TWIN}": graph.control["replacement"],
        })  # fmt: skip
    return {name: round(sum(each[name] for each in found) / len(found), 3) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="hooked_lm/demo")
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--k", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", nargs="*", default=["demo", TWIN], help="of which model; the file of figures keeps others"
    )
    options = parser.parse_args()
    random = Random(1)
    texts = [training_text(random) for _ in range(options.texts)]
    known = {*texts}
    held_out = [text for _ in range(10 * options.held_out) if (text := training_text(random)) not in known][
        : options.held_out
    ]
    model = HookedTransformer.from_pretrained("demo")
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "models")}
    figures = Path(options.out, "transcoders.json")
    found_before = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    report: dict[str, Any] = {**found_before, "layers": [*range(model.cfg.n_layers), "all"], "settings": settings}
    made: dict[bool, list[LayerTranscoders]] = {False: [], True: []}
    for name in options.models:
        one = model if name == "demo" else model.untrained(seed=0).eval()
        data, new = vectors(one, texts), vectors(one, held_out)
        report[f"linear map, {name}"] = linear(data, new)
        for across in (False, True):
            found = trained(one, ActivationBatches(*data), across, options)
            key = NAMES[across] if one is model else f"{NAMES[across]}, {name}"
            report[key] = measured(one, held_out, found)
            print(key, json.dumps(report[key]["figures"], indent=1))
            if one is model:
                for weight in found.parameters():
                    weight.data = weight.data.bfloat16() if weight.ndim == 2 else weight.data
                found.save(Path(options.out) / FILES[across])
            made[across].append(found.float().eval())
    if options.models == ["demo", TWIN]:
        report["graphs"] = {NAMES[across]: graphs(model, *sets) for across, sets in made.items()}
        report["graphs"]["neurons"] = graphs(model, None, None)
    figures.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
