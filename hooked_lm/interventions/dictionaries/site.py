"""The site that a dictionary reads: the given one, or the one in its config."""

import re
from typing import Any
from weakref import WeakKeyDictionary

from hooked_lm.callers import warn_caller
from hooked_lm.hooks.select import Site
from hooked_lm.models.aliases import same_value

_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()  # dictionary -> the sites that it was warned of


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
    >>> site_read(
    ...     TopK.Config(d_in=8, d_sae=16, k=2, hook_point="blocks.1.hook_mlp_out").build(),
    ...     None,
    ... )
    'blocks.1.hook_mlp_out'
    """
    check_dictionary(sae)
    found: Site = own_site(sae) if site is None else site
    if not found:
        raise ValueError("the config of the dictionary names no site: give site=")
    return found


def warn_if_elsewhere(sae: object, read: str, written: str | None = None) -> None:
    """Warns, once for each site, of a dictionary at another site than the one in its config, which it reads, or, as a transcoder,
    writes."""
    try:
        warned = _warned.setdefault(sae, set())
    except TypeError:  # no hash, or no weak references
        warned = set()
    known = own_site(sae), getattr(getattr(sae, "cfg", None), "hook_point_out", None)
    for verb, own, site in zip(("reads", "writes"), known, (read, written), strict=True):
        if own and site and site not in warned and not _may_be_same(own, site):
            warned.add(site)
            given = f"'{site}'" if verb == "reads" else f"'{read}', '{site}'"
            meant = f"; if you mean it, give sae.at({given})" if hasattr(sae, "at") else ""
            warn_caller(
                f"the dictionary {verb} '{own}', and here it {verb} '{site}': features of one site may mean nothing at another"
                f"{meant}"
            )


def _may_be_same(one: str, other: str) -> bool:
    """Whether two names may be of one value: aliases, the end of a block and the start of the next, and names of other kinds.

    >>> (
    ...     _may_be_same("blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"),
    ...     _may_be_same("blocks.1.hook_z", "blocks.2.hook_z"),
    ... )
    (True, False)
    """
    names = [
        re.sub(r"(\d+)\.hook_resid_post$", lambda of: f"{int(of[1]) + 1}.hook_resid_pre", of) for of in (one, other)
    ]
    is_alias = same_value(one, [other]) == other or same_value(other, [one]) == one
    return is_alias or names[0] == names[1] or not all("hook_" in name for name in names)
