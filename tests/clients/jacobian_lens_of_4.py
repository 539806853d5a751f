"""Run in a separate process: TransformerLens 4.3 itself, first on the path, and its Jacobian lens on a bridge of a tiny GPT-2.

`python jacobian_lens_of_4.py FOLDER CASE` reads the checkpoint and `given.pt` of CASE (the prompts, a lens of ours and vectors to
decompose), and writes the lens that it fits to `theirs.pt`, and what it reads to `found.pt` there.
"""

import sys
from pathlib import Path

FOLDER, CASE = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, FOLDER)

import torch  # noqa: E402
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module  # noqa: E402
from transformer_lens.tools.analysis import JacobianLens  # noqa: E402
from transformer_lens.tools.analysis.jacobian_lens_decomposition import get_sparse_decomposition  # noqa: E402
from transformers import GPT2LMHeadModel  # noqa: E402

original = GPT2LMHeadModel.from_pretrained(CASE, local_files_only=True).eval()
bridge = build_bridge_from_module(original, "GPT2LMHeadModel", hf_config=original.config)
bridge.to_tokens = lambda prompt: torch.tensor([[int(token) for token in prompt.split()]])  # it has no tokenizer

given = torch.load(CASE / "given.pt")
prompts = [" ".join(map(str, row)) for row in given["prompts"].tolist()]
fitted = JacobianLens.fit(
    bridge, prompts, corpus="random ids", dim_batch=7, skip_first_positions=2, show_progress=False
)
fitted.save(str(CASE / "theirs.pt"), dtype=torch.float32)
ours = JacobianLens.load(str(CASE / "ours.pt")).validate_model(bridge)
found = {"loaded": torch.stack([ours.jacobians[layer] for layer in ours.source_layers])}
for name, lens in (("theirs", fitted), ("ours", ours)):
    read = lens.readout(bridge, given["prompts"][:1], return_full_logits=True)
    found[name] = torch.stack([read.lens_logits[layer] for layer in sorted(read.lens_logits)])
decomposed = [get_sparse_decomposition(x, given["directions"], 5) for x in given["vectors"]]
found["support"] = torch.stack([one.selected_support for one in decomposed])
found["reconstruction"] = torch.stack([one.reconstruction for one in decomposed])
torch.save(found, CASE / "found.pt")
