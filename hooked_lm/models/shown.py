"""How models are shown in notebooks: what they are, and a table of their sites."""

from collections.abc import Callable

from hooked_lm.hooks import HookedRootModule, HookPoint

__all__ = ["model_html"]


def model_html(model: HookedRootModule, in_bare_cache: Callable[[HookPoint], bool]) -> str:
    """A model as HTML: a line of facts, and the sites with their axes, those of a layer once for all equal layers."""
    from hooked_lm.viz.tables import bytes_in_words, details, html_table, summary

    cfg = model.cfg
    parameters = {id(p): p for p in model.parameters()}.values()
    n, n_bytes = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    facts = [
        ("name", cfg.model_name),
        ("architecture", cfg.original_architecture or "built from a config"),
        ("parameters", f"{n:,} ({bytes_in_words(n_bytes)})"),
        ("weights", ", ".join(cfg.processed) or "as in the checkpoint, not folded"),
        ("device, dtype", f"{model.device}, {str(cfg.dtype).removeprefix('torch.')}"),
        (
            "sizes",
            ", ".join(
                f"{name} {getattr(cfg, name)}" for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab")
            ),
        ),
        ("tokenizer", "none" if model.tokenizer is None else type(model.tokenizer).__name__),
    ]
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, point in model.all_points().items():
        first, *rest = name.split(".")
        is_layer = bool(rest) and rest[0].isdigit()
        when = "always" if in_bare_cache(point) else "on demand"
        key = (first if is_layer else "", ".".join(rest[1:]) if is_layer else name, " ".join(point.dims), when)
        groups.setdefault(key, []).append(rest[0] if is_layer else "")
    rows = []
    for (stack, site, axes, when), layers in groups.items():
        where = (
            f"{stack}.{{{layers[0]}-{layers[-1]}}}." if len(layers) > 1 else f"{stack}.{layers[0]}." if stack else ""
        )
        rows.append((where + site, axes, len(layers), when))
    sites = html_table(("site", "axes", "layers", "in a cache"), rows)
    title = f"{sum(row[2] for row in rows)} sites"
    return summary(type(model).__name__, html_table(("", ""), facts), details(title, sites))
