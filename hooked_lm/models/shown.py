"""How models are shown in notebooks: what they are, and a table of their sites."""

from collections.abc import Callable

from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.listed import table_of_sites
from hooked_lm.notebook_repr import bytes_in_words, details, html_table, summary

__all__ = ["model_html"]


def model_html(model: HookedRootModule, in_bare_cache: Callable[[HookPoint], bool]) -> str:
    """A model as HTML: a line of facts, and the sites with their axes, those of a layer once for all equal layers."""
    cfg = model.cfg
    parameters = {id(p): p for p in model.parameters()}.values()
    n, n_bytes = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    built = not cfg.original_architecture
    facts = [
        ("name", cfg.model_name),
        ("architecture", "built from a config" if built else cfg.original_architecture),
        ("parameters", f"{n:,} ({bytes_in_words(n_bytes)})"),
        ("weights", ", ".join(cfg.processed) or ("not folded" if built else "as in the checkpoint, not folded")),
        ("device, dtype", f"{model.device}, {str(cfg.dtype).removeprefix('torch.')}"),
        (
            "sizes",
            ", ".join(
                f"{name} {getattr(cfg, name)}" for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab")
            ),
        ),
        ("tokenizer", "none" if model.tokenizer is None else type(model.tokenizer).__name__),
    ]
    sites = html_table(*table_of_sites(model.all_points(), in_bare_cache))
    title = f"{len(model.all_points())} sites"
    return summary(type(model).__name__, html_table(("", ""), facts), details(title, sites))
