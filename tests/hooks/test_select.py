"""What a user writes for a site, and which points that means."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm.hooks import UnknownSite
from hooked_lm.hooks.select import is_shorthand, select
from tests.hooks.nets import SITES

NAMES = dict.fromkeys(SITES)
ALIASES = {"blocks.0.out": "blocks.0.hook_post", "hook_in": "hook_out", "left.hook": "hook_left"}


def shorthand(site: Any) -> str:
    name, layer = site if isinstance(site, tuple) else (site, None)
    return f"hook_{name}" if layer is None else f"blocks.{layer}.hook_{name}"


def found(site: Any) -> list[str]:
    return select(site, NAMES, ALIASES, shorthand)


@pytest.mark.parametrize(
    ("site", "names"),
    [
        ("hook_left", ["hook_left"]),
        ("left", ["hook_left"]),
        (("post", 1), ["blocks.1.hook_post"]),
        (("left", None), ["hook_left"]),
        ([("post", 1), "in"], ["hook_in", "blocks.1.hook_post"]),
        ("blocks.0.out", ["blocks.0.hook_post"]),
        ("blocks.?.out", ["blocks.0.hook_post"]),
        ("hook_in", ["hook_in"]),
        ("hook_[lr]*", ["hook_left", "hook_right"]),
        (lambda name: name == "left.hook", ["hook_left"]),
        (["hook_left", "hook_left", "hook_l*"], ["hook_left"]),
    ],
)
def test_ways_to_say_a_site(site: Any, names: list[str]) -> None:
    assert found(site) == names


@given(chosen=st.lists(st.sampled_from(SITES), min_size=1))
def test_a_list_gives_each_site_once_in_order_of_computation(chosen: list[str]) -> None:
    assert found(chosen) == [name for name in SITES if name in chosen]
    assert found(tuple(chosen)) == found(chosen) == found(lambda name: name in chosen)


@pytest.mark.every_parameter
@pytest.mark.parametrize("site", ["hook_lft", "hook_l[", "*.lef?", ("lft", None), ["hook_left", "hook_lft"]])
def test_an_unknown_name_comes_with_the_three_nearest(site: Any) -> None:
    with pytest.raises(UnknownSite) as raised:
        found(site)
    message = str(raised.value)
    assert isinstance(raised.value, KeyError)
    assert message.startswith("no hook point '")
    assert "'hook_left'" in message or "'left.hook'" in message
    assert message.count("'") == 8


def test_a_glob_comes_with_three_sites_whatever_their_layers_and_aliases() -> None:
    names = [f"blocks.{i}.{name}" for i in range(3) for name in ("hook_resid_pre", "attn.hook_z", "attn.hook_q")]
    aliases = {f"blocks.{i}.hook_in": f"blocks.{i}.hook_resid_pre" for i in range(3)}
    with pytest.raises(UnknownSite) as raised:
        select("blocks.*.hook_zz", dict.fromkeys(names), aliases, shorthand)
    suggested = str(raised.value).partition("did you mean ")[2].rstrip("?").split(", ")
    assert suggested[0] == "'blocks.*.attn.hook_z'"
    assert set(suggested) == {"'blocks.*.attn.hook_z'", "'blocks.*.attn.hook_q'", "'blocks.*.hook_resid_pre'"}


def test_no_names_at_all() -> None:
    with pytest.raises(UnknownSite, match="did you mean another module"):
        select("x", {}, {}, str)


def test_a_predicate_or_list_that_selects_nothing_warns() -> None:
    for site in (lambda name: False, []):
        with pytest.warns(UserWarning, match=r"selects none of 10 hook points; their names are such as '"):
            assert found(site) == []


def test_what_is_a_shorthand() -> None:
    assert is_shorthand(("z", 5))
    assert is_shorthand(("k", 5, "a"))
    assert is_shorthand(("z", np.int64(5)))
    assert not is_shorthand(("z", "q"))
    assert not is_shorthand(["z", 5])
    assert not is_shorthand(("z",))
