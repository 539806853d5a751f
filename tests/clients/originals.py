"""Run in a process of its own: TransformerLens itself, its folder first on the path, makes models and reads ours.

`python originals.py FOLDER TASKS`: TASKS is a folder with `cases.json`, {name: {"kind", "fields"}}, and perhaps for each name
weights `{name}.safetensors` that were written elsewhere. What is left there: `{name}.theirs.safetensors` (weights and "logits")
and `{name}.fields.json`, or for given weights `{name}.logits.safetensors` and `{name}.misfits.json`.
"""

import json
import sys
from pathlib import Path

FOLDER, TASKS = sys.argv[1:]
sys.path.insert(0, FOLDER)

import torch  # noqa: E402
import transformer_lens as lens  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

KINDS = {"decoder": lens.HookedTransformer, "encoder": lens.HookedEncoder, "both": lens.HookedEncoderDecoder}
TABLES = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
TOKENS = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(3))


def logits(kind, model):
    if kind == "both":
        return model(TOKENS, TOKENS[:, :5], one_zero_attention_mask=torch.ones_like(TOKENS))
    return model(TOKENS, return_type="logits")


def fill(model, without):
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        if without and name.startswith(without[0]) and without[1] in name:
            weight.zero_()


def plain(value):
    return value if isinstance(value, (int, float, str, bool, list, type(None))) else str(value)


@torch.no_grad()
def main(tasks: Path) -> None:
    for name, case in json.loads((tasks / "cases.json").read_text()).items():
        model = KINDS[case["kind"]](lens.HookedTransformerConfig.from_dict(case["fields"])).eval()
        if (given := tasks / f"{name}.safetensors").exists():
            found = model.load_state_dict(load_file(given), strict=False)
            missing = [key for key in found.missing_keys if not key.endswith(TABLES)]
            (tasks / f"{name}.misfits.json").write_text(json.dumps([*missing, *found.unexpected_keys]))
            save_file({"logits": logits(case["kind"], model)}, tasks / f"{name}.logits.safetensors")
            continue
        fill(model, case.get("without"))
        if case["kind"] == "both":  # T5's are one matrix
            model.unembed.W_U.copy_(model.embed.W_E.T)
        weights = {key: value.clone().contiguous() for key, value in model.state_dict().items()}
        save_file({**weights, "logits": logits(case["kind"], model)}, tasks / f"{name}.theirs.safetensors")
        fields = {
            key: float(value) if key == "attn_scale" else plain(value) for key, value in model.cfg.to_dict().items()
        }
        (tasks / f"{name}.fields.json").write_text(json.dumps(fields))


main(Path(TASKS))
