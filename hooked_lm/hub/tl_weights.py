"""Converts weights saved by early training code to TransformerLens names; the tensor names show which code saved them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Turn = Callable[[Tensor, int], Tensor]  # (weight, number of heads) -> weight


def _same(weight: Tensor, n_heads: int) -> Tensor:
    return weight


def _turned(weight: Tensor, n_heads: int) -> Tensor:
    return weight.T


def _reads(weight: Tensor, n_heads: int) -> Tensor:
    """[heads * d_head, d_model] -> [heads, d_model, d_head], and biases [heads * d_head] -> [heads, d_head]."""
    by_head = weight.unflatten(0, (n_heads, -1))
    return by_head.transpose(1, 2) if by_head.ndim == 3 else by_head


def _writes(weight: Tensor, n_heads: int) -> Tensor:
    """[d_model, heads * d_head] -> [heads, d_head, d_model]."""
    return weight.T.unflatten(0, (n_heads, -1))


# Regular expressions of minGPT's names (Karpathy 2020, github.com/karpathy/minGPT), our names, conversions of the weights.
MINGPT: list[tuple[str, str, Turn]] = [
    (r"tok_emb\.weight", "embed.W_E", _same),
    (r"pos_emb", "pos_embed.W_pos", lambda weight, n_heads: weight.squeeze(0)),
    (r"(blocks\.\d+\.ln[12])\.weight", r"\1.w", _same),
    (r"(blocks\.\d+\.ln[12])\.bias", r"\1.b", _same),
    *(
        (rf"(blocks\.\d+\.attn)\.{theirs}\.{kind}", rf"\1.{letter}_{ours}", _reads)
        for theirs, ours in (("query", "Q"), ("key", "K"), ("value", "V"))
        for kind, letter in (("weight", "W"), ("bias", "b"))
    ),
    (r"(blocks\.\d+\.attn)\.proj\.weight", r"\1.W_O", _writes),
    (r"(blocks\.\d+\.attn)\.proj\.bias", r"\1.b_O", _same),
    (r"(blocks\.\d+\.mlp)\.0\.weight", r"\1.W_in", _turned),
    (r"(blocks\.\d+\.mlp)\.0\.bias", r"\1.b_in", _same),
    (r"(blocks\.\d+\.mlp)\.2\.weight", r"\1.W_out", _turned),
    (r"(blocks\.\d+\.mlp)\.2\.bias", r"\1.b_out", _same),
    (r"head\.weight", "unembed.W_U", _turned),
    (r"ln_f\.weight", "ln_final.w", _same),
    (r"ln_f\.bias", "ln_final.b", _same),
]


def from_mingpt(state_dict: Mapping[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """Returns the weights of a minGPT by TransformerLens names; `cfg` gives the number of heads. Unknown names are kept."""
    state = {}
    for name, weight in state_dict.items():
        row = next((row for row in MINGPT if re.fullmatch(row[0], name)), None)
        if row is None:
            state[name] = weight
        else:
            state[re.sub(row[0], row[1], name)] = row[2](weight, cfg.n_heads)
    return state


NORM = re.compile(r"(^|\.)norm(?=[12]?\.)")  # the early name of ln


def from_early_solu(state_dict: Mapping[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """Returns the weights of the first SoLU models by TransformerLens names; `cfg` gives their sizes.

    Norms are renamed. Models of up to 6 layers store all matrices as [out, in]; the one with 8 layers stores only its position
    embedding so. The shapes show this, except for a square position embedding, where the number of layers decides.
    """
    renamed = {re.sub(r"^ln\.", "ln_final.", NORM.sub(r"\1ln", name)): weight for name, weight in state_dict.items()}
    all_turned = tuple(renamed["embed.W_E"].shape) == (cfg.d_model, cfg.d_vocab) != (cfg.d_vocab, cfg.d_model)
    turned_positions = (
        cfg.n_layers <= 8 if cfg.d_model == cfg.n_ctx else renamed["pos_embed.W_pos"].shape[0] == cfg.d_model
    )

    def is_turned(name: str) -> bool:
        return turned_positions if name == "pos_embed.W_pos" else all_turned and ".W_" in name

    return {name: weight.transpose(-2, -1) if is_turned(name) else weight for name, weight in renamed.items()}


def in_public_names(tensors: Mapping[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """Returns weights by TransformerLens names, whichever training code saved them."""
    if "tok_emb.weight" in tensors:
        return from_mingpt(tensors, cfg)
    if any(NORM.search(name) for name in tensors):
        return from_early_solu(tensors, cfg)
    return dict(tensors)
