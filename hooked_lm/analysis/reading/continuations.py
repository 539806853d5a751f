"""Continues a prompt with vectors put at a position of it: the primitive of patchscopes and of `verbalize`."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.engine.cells_before_blocks import rows_and_positions
from hooked_lm.engine.prompts import Prompts, rows_of
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import PromptRows, VisionInputs, repeated_rows

ROWS = 64  # the maximum batch size of generation


def one_prompt(model: Decoder, prompt: Prompts, position: int, name: str, site: str) -> tuple[PromptRows, int]:
    """One prompt, and the non-negative position at a site."""
    tokens = rows_of(model, prompt, f"the {name} prompt").to(model.device)
    if len(tokens) != 1:
        raise ValueError(f"there is one {name} prompt, got {len(tokens)}")
    n_rows, n_pos = rows_and_positions(model, tokens, site)
    if n_rows != 1:
        raise ValueError(
            f"'{site}' has values of images, of which the {name} prompt has {n_rows}: give a prompt with one"
        )
    if not -n_pos <= position < n_pos:
        raise IndexError(f"{name} position {position} is out of range: there are {n_pos} at '{site}'")
    return tokens, position % n_pos


def continued(
    model: Decoder,
    target: PromptRows,
    position: int,
    cells: Sequence[tuple[Tensor | None, str]],
    n: int,
) -> Int[Tensor, "cell n"]:
    """The generated tokens for each cell, a pair of a state (None: nothing is put) and the site that it is put at.

    Decoding is greedy, and an end-of-sequence token does not stop it.
    """
    some = (cells[start : start + ROWS] for start in range(0, len(cells), ROWS))
    return torch.cat([_continued_rows(model, target, position, part, n) for part in some])


def _continued_rows(
    model: Decoder,
    target: PromptRows,
    position: int,
    cells: Sequence[tuple[Tensor | None, str]],
    n: int,
) -> Int[Tensor, "cell n"]:
    """As `continued`, in one batch."""
    rows = repeated_rows(target, len(cells))
    mask = rows.attention_mask if isinstance(rows, VisionInputs) else None
    ones = torch.ones(rows.shape, dtype=torch.long, device=model.device)
    by_site: dict[str, dict[int, Tensor]] = {}
    for row, (state, site) in enumerate(cells):
        if state is not None:
            by_site.setdefault(site, {})[row] = state
    hooks = [(site, Put(rows, position)) for site, rows in by_site.items()]
    with model.hooks(fwd_hooks=hooks):
        whole = model.generate(
            rows, n, stop_at_eos=False, do_sample=False, return_type="tokens", verbose=False,
            attention_mask=ones if mask is None else mask,
        )  # fmt: skip
    return whole[:, rows.shape[1] :].cpu()


class Put:
    """A hook that replaces a position of the prompt in some rows, in every forward pass that computes it.

    With a key/value cache that is the first one, without a cache it is every one.
    """

    def __init__(self, states: dict[int, Tensor], position: int) -> None:
        self.rows, self.states = list(states), torch.stack(list(states.values()))
        self.position = position

    def __call__(self, value: Float[Tensor, "cell pos d_model"], hook: HookPoint) -> Tensor | None:
        n_generated = hook.step or 0
        if hook.grows and n_generated and value.shape[1] <= n_generated:  # of new tokens only
            return None
        value = value.clone()
        value[self.rows, self.position] = self.states.to(value)
        return value


def texts_of(model: Decoder, tokens: Int[Tensor, "row column new"]) -> list[list[str | None]]:
    """The texts of generated tokens; None without a tokenizer."""
    if getattr(model, "tokenizer", None) is None:
        return [[None] * tokens.shape[1] for _ in tokens]
    return [[str(model.to_string(new)) for new in row] for row in tokens]
