"""What sae-probes does with a model: activations at the end of each text of a data set, and a probe of them.

`python sae_probes_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes what
`everything` finds to the file OUT.
"""

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

SITES = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "blocks.1.hook_mlp_out"]
LONGEST = 12  # longer texts lose their beginning


def texts() -> list[str]:
    """Texts of 2 to 15 words, the odd ones with a word that the others lack."""
    random = Random(0)
    found = []
    for i in range(60):
        words = [f"w{random.randrange(3, 58)}" for _ in range(random.randint(2, 15))]
        words[-random.randint(1, 2)] = "w59" if i % 2 else "w58"
        found.append(" ".join(words))
    return found


def everything() -> dict[str, Tensor]:
    import pandas as pd
    from circuitkit_run import made
    from sae_probes.generate_model_activations import generate_single_dataset_activations
    from sae_probes.utils_training import find_best_reg

    model: Any = made("gpt2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pd.DataFrame({"prompt": texts()}).to_csv(folder / "words.csv.zst", index=False)
        generate_single_dataset_activations(
            model, "tiny", folder / "words.csv.zst", SITES, folder, device="cpu", max_seq_len=LONGEST, batch_size=7
        )
        found = {site: torch.load(file) for site in SITES for file in folder.glob(f"*/words_{site}.pt")}
    labels = torch.arange(60) % 2
    x, y = found[SITES[1]].numpy(), labels.numpy()
    probe = find_best_reg(x[:40], y[:40], x[40:], y[40:], n_jobs=1, parallel=False)
    return {**found, "probe": torch.tensor([probe.metrics.test_auc, probe.metrics.test_acc])}


def main(folder: str, out: Path) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in everything().items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
