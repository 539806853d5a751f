"""The code that a plain forward runs is short enough to be read in one sitting."""

import sys
from pathlib import Path
from typing import Any

import torch

import hooked_lm
from hooked_lm import HookedTransformer
from tests.models.toys import ids

MAX_FILES, MAX_LINES = 9, 1500  # whole files outside of hooks/
LLAMA = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "d_head": 4,
    "n_key_value_heads": 2,
    "d_mlp": 32,
    "d_vocab": 50,
    "n_ctx": 24,
    "act_fn": "silu",
    "gated_mlp": True,
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "device": "cpu",
}


def files_entered(model: HookedTransformer, tokens: torch.Tensor) -> set[Path]:
    """The files of the package whose functions a forward pass calls."""
    names: set[str] = set()

    def record(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        model(tokens)
    finally:
        sys.setprofile(before)
    root = Path(hooked_lm.__file__).parent
    return {Path(name) for name in names if Path(name).is_relative_to(root)}


@torch.no_grad()
def test_a_plain_forward_enters_few_files() -> None:
    model, root = HookedTransformer(LLAMA), Path(hooked_lm.__file__).parent
    model(ids())  # what is computed once is not part of a plain forward
    found = sorted(path.relative_to(root) for path in files_entered(model, ids()))
    lines = {str(path): len((root / path).read_text().splitlines()) for path in found if path.parts[0] != "hooks"}
    assert {"models/decoder.py", "components/attention/multihead.py", "components/embeddings/rotary.py"} <= lines.keys()
    listed = "\n".join(f"{n:5} {path}" for path, n in lines.items())
    assert len(lines) <= MAX_FILES, f"a plain forward enters {len(lines)} files, at most {MAX_FILES}:\n{listed}"
    total = sum(lines.values())
    assert total <= MAX_LINES, f"a plain forward enters files of {total} lines, at most {MAX_LINES}:\n{listed}"
