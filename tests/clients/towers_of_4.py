"""Run in a process of its own: TransformerLens 4.3 itself, first on the path, and its bridges of models that read images.

`python towers_of_4.py FOLDER CASES` reads the checkpoint and `inputs.pt` of each folder in CASES, and writes what hooks of the
bridge's tower and projector see to `sites.pt` there: {name: value, None where nothing was seen}.
"""

import sys
from pathlib import Path
from typing import Any

FOLDER, CASES = sys.argv[1:]
sys.path.insert(0, FOLDER)

import torch  # noqa: E402
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter  # noqa: E402
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

# Pixels are given as tensors. (`boot_transformers` would install torchvision by itself.)
ArchitectureAdapter._check_required_libraries = lambda adapter: None


@torch.no_grad()
def sites(folder: Path) -> dict[str, torch.Tensor | None]:
    """The values of all hook points of the tower and the projector, under each of their names."""
    model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    points = {name: point for name, point in bridge.hook_dict.items() if name.startswith("vision_")}
    seen: dict[int, torch.Tensor] = {}

    def keep(value: Any, hook: Any) -> None:
        seen[id(hook)] = value.clone()

    for point in {id(point): point for point in points.values()}.values():
        point.add_hook(keep)
    bridge.original_model(**torch.load(folder / "inputs.pt"))
    return {name: seen.get(id(point)) for name, point in points.items()}


for folder in Path(CASES).iterdir():
    torch.save(sites(folder), folder / "sites.pt")
