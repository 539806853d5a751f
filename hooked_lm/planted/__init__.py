"""Small models whose circuits are known, to test methods on: written by hand, and compiled from programs.

from hooked_lm import planted
example = planted.load("induction")
example.truth            # the true edges, as a Circuit
example.check()          # the same by exact patching of all edges
"""

from collections.abc import Callable
from difflib import get_close_matches

from hooked_lm.keywords import answer_keywords
from hooked_lm.planted.blueprint import Blueprint
from hooked_lm.planted.compiler import CompiledProgram, compile_program
from hooked_lm.planted.heads import copy_suppression, induction, previous_token, soft_induction, two_hop
from hooked_lm.planted.misleading import backup, distractor, redundancy
from hooked_lm.planted.mlps import and_gate, facts, or_gate, xor_gate
from hooked_lm.planted.planted import Planted
from hooked_lm.planted.programs import brackets, histogram, reverse, sort

__all__ = ["Blueprint", "CompiledProgram", "Planted", "compile_program", "load", "names"]

MODELS: dict[str, Callable[[int], Planted]] = {
    "previous-token": previous_token,
    "induction": induction,
    "soft-induction": soft_induction,
    "two-hop": two_hop,
    "copy-suppression": copy_suppression,
    "facts": facts,
    "and-gate": and_gate,
    "or-gate": or_gate,
    "xor-gate": xor_gate,
    "backup": backup,
    "redundancy": redundancy,
    "distractor": distractor,
    "reverse": reverse,
    "sort": sort,
    "histogram": histogram,
    "brackets": brackets,
}


def names() -> list[str]:
    """The names of the planted models.

    >>> from hooked_lm import planted
    >>> planted.names()[:3]
    ['previous-token', 'induction', 'soft-induction']
    """
    return list(MODELS)


def load(name: str, seed: int = 0) -> Planted:
    """Make a planted model, with its task, its prompts and its true circuit.

    Args:
        name: one of `names()`.
        seed: of the prompts, and of the heads and neurons that have no part in the task.

    Raises KeyError for an unknown name.

    >>> from hooked_lm import planted
    >>> example = planted.load("copy-suppression")
    >>> list(example.truth.graph.named(example.truth.edges))[:3]
    [('input', 'm0'), ('input', 'L1H0<k>'), ('input', 'L1H0<v>')]
    >>> planted.load("copy suppresion")
    Traceback (most recent call last):
    KeyError: "there is no planted model 'copy suppresion'; did you mean 'copy-suppression'?"
    """
    if name not in MODELS:
        near = get_close_matches(str(name), MODELS, 3, 0.5) or list(MODELS)
        raise KeyError(f"there is no planted model {name!r}; did you mean {', '.join(map(repr, near))}?")
    return MODELS[name](seed)


answer_keywords(__name__)
