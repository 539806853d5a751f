"""The site that a dictionary reads: the given one, or the one in its config."""

from typing import Any

from hooked_lm.hooks.select import Site


def own_site(sae: object) -> Any:
    """The site in a dictionary's config, of this package or another; "" if there is none."""
    cfg = getattr(sae, "cfg", None)
    return getattr(cfg, "hook_point", None) or getattr(getattr(cfg, "metadata", None), "hook_name", None) or ""


def check_dictionary(sae: object) -> None:
    """Raises TypeError for what lacks `encode` or `decode`, such as a TrainedDictionary, which has a dictionary."""
    for name in ("encode", "decode"):
        if not callable(getattr(sae, name, None)):
            hint = "; give its .sae" if hasattr(sae, "sae") else ""
            raise TypeError(f"a dictionary has encode and decode, and a {type(sae).__name__} has no {name}{hint}")


def site_read(sae: object, site: Site | None) -> Site:
    """The given site, or the dictionary's own. Raises ValueError if neither is known, TypeError for no dictionary.

    >>> from hooked_lm.interventions.dictionaries import TopK
    >>> site_read(TopK.Config(d_in=8, d_sae=16, k=2, hook_point="blocks.1.hook_mlp_out").build(), None)
    'blocks.1.hook_mlp_out'
    """
    check_dictionary(sae)
    found: Site = own_site(sae) if site is None else site
    if not found:
        raise ValueError("the config of the dictionary names no site: give site=")
    return found
