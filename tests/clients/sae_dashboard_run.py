"""A program that makes sae-dashboard's pages of SAE features: `python sae_dashboard_run.py OUT [FOLDER]`.

It writes OUT/{case}.json and .html for each of CASES. FOLDER, which has TransformerLens itself, is put first on the path.
"""

import sys
from pathlib import Path
from typing import Any

import torch

SITES: dict[str, dict[str, Any]] = {
    "blocks.1.hook_resid_pre": {},
    "blocks.1.hook_mlp_out": {},
    "blocks.1.ln2.hook_normalized": {},
    "blocks.1.attn.hook_z": {},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"d_mlp": 64, "act_fn": "gelu_new"},
    "grouped": {
        "d_mlp": 64, "act_fn": "silu", "n_key_value_heads": 2, "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
    },
}  # fmt: skip
CASES = [(model, site) for model in MODELS for site in SITES]
FEATURES = [0, 3, 5, 17, 40]


def run(name: str, site: str, out: Path) -> None:
    """The page's data in `{out}.json`, and the page itself in `{out}.html`."""
    from circuit_tracer_run import SIZES, filled, tokenizer
    from sae_dashboard.data_writing_fns import save_feature_centric_vis
    from sae_dashboard.sae_vis_data import SaeVisConfig
    from sae_dashboard.sae_vis_runner import SaeVisRunner
    from sae_lens import HookedSAETransformer
    from saes import made
    from transformer_lens import HookedTransformerConfig

    model = HookedSAETransformer(HookedTransformerConfig.from_dict({**SIZES, **MODELS[name]}))
    filled(model).requires_grad_(False)
    model.tokenizer = tokenizer()
    generator = torch.Generator().manual_seed(0)
    rows = [3 + torch.randperm(57, generator=generator)[:12] for _ in range(24)]  # no word twice: no ties
    use_dfa = site.endswith("hook_z")
    cfg = SaeVisConfig(
        hook_point=site, features=FEATURES, minibatch_size_features=3, minibatch_size_tokens=8, use_dfa=use_dfa
    )
    sae = made(site, 32)
    sae.cfg.hook_name = site  # where it looks for it; SAELens has moved it to the metadata
    data = SaeVisRunner(cfg).run(encoder=sae, model=model, tokens=torch.stack(rows))
    data.save_json(out.with_suffix(".json"))
    data.model = model
    save_feature_centric_vis(sae_vis_data=data, filename=out.with_suffix(".html"))


def main(out: Path, *folder: str) -> None:
    sys.path[:0] = [*folder, str(Path(__file__).parent)]
    for name, site in CASES:
        run(name, site, out / f"{name}-{site.replace('.', '-')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
