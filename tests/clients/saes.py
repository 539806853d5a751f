"""SAELens dictionaries with random weights, for the tests of this folder."""

from typing import Any

import torch
from sae_lens.registry import get_sae_class

WIDTH = 96


def made(
    hook_name: str, d_in: int = 128, architecture: str = "standard", out: str | None = None, **options: Any
) -> Any:
    """One for a site, every weight of it some number; with `out` a transcoder to another site."""
    cls, config = get_sae_class(architecture)
    if out is not None:
        options["d_out"] = d_in
    cfg = config(d_in=d_in, d_sae=WIDTH, **options)
    cfg.metadata.hook_name = hook_name
    if out is not None:
        cfg.metadata.hook_name_out = out
    sae = cls(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sae.named_parameters():
            drawn = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn.abs() if name == "threshold" else drawn)
    return sae.eval().requires_grad_(False)


def spliced(sae: Any) -> tuple[str, Any]:
    """The same by a hook of ours: the site, and the reconstruction in its place."""
    return sae.cfg.metadata.hook_name, lambda value, hook: sae.decode(sae.encode(value))
