"""Converts weights saved by early training code to TransformerLens names; the tensor names show which code saved them."""

import re
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from hooked_lm.models.config.flat import HookedTransformerConfig

Conversion = Callable[[Tensor, int], Tensor]  # (weight, number of heads) -> weight


def _unchanged(weight: Tensor, n_heads: int) -> Tensor:
    return weight


def _transposed(weight: Tensor, n_heads: int) -> Tensor:
    return weight.T


def _by_head(weight: Tensor, n_heads: int) -> Tensor:
    """[heads * d_head, d_model] -> [heads, d_model, d_head], and biases [heads * d_head] -> [heads, d_head]."""
    by_head = weight.unflatten(0, (n_heads, -1))
    return by_head.transpose(1, 2) if by_head.ndim == 3 else by_head


def _by_head_out(weight: Tensor, n_heads: int) -> Tensor:
    """[d_model, heads * d_head] -> [heads, d_head, d_model]."""
    return weight.T.unflatten(0, (n_heads, -1))


# Regular expressions of minGPT's names (Karpathy 2020, github.com/karpathy/minGPT), our names, conversions of the weights.
MINGPT: list[tuple[str, str, Conversion]] = [
    (r"tok_emb\.weight", "embed.W_E", _unchanged),
    (r"pos_emb", "pos_embed.W_pos", lambda weight, n_heads: weight.squeeze(0)),
    (r"(blocks\.\d+\.ln[12])\.weight", r"\1.w", _unchanged),
    (r"(blocks\.\d+\.ln[12])\.bias", r"\1.b", _unchanged),
    *(
        (rf"(blocks\.\d+\.attn)\.{role}\.{kind}", rf"\1.{leaf}_{letter}", _by_head)
        for role, letter in (("query", "Q"), ("key", "K"), ("value", "V"))
        for kind, leaf in (("weight", "W"), ("bias", "b"))
    ),
    (r"(blocks\.\d+\.attn)\.proj\.weight", r"\1.W_O", _by_head_out),
    (r"(blocks\.\d+\.attn)\.proj\.bias", r"\1.b_O", _unchanged),
    (r"(blocks\.\d+\.mlp)\.0\.weight", r"\1.W_in", _transposed),
    (r"(blocks\.\d+\.mlp)\.0\.bias", r"\1.b_in", _unchanged),
    (r"(blocks\.\d+\.mlp)\.2\.weight", r"\1.W_out", _transposed),
    (r"(blocks\.\d+\.mlp)\.2\.bias", r"\1.b_out", _unchanged),
    (r"head\.weight", "unembed.W_U", _transposed),
    (r"ln_f\.weight", "ln_final.w", _unchanged),
    (r"ln_f\.bias", "ln_final.b", _unchanged),
]


def from_mingpt(state_dict: Mapping[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
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


def from_early_solu(state_dict: Mapping[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Returns the weights of the first SoLU models by TransformerLens names; `cfg` gives their sizes.

    Norms are renamed. Models of up to 6 layers store all matrices as [out, in]; the one with 8 layers stores only its position
    embedding so. The shapes show this, except for a square position embedding, where the number of layers decides.
    """
    renamed = {re.sub(r"^ln\.", "ln_final.", NORM.sub(r"\1ln", name)): weight for name, weight in state_dict.items()}
    all_transposed = tuple(renamed["embed.W_E"].shape) == (cfg.d_model, cfg.d_vocab) != (cfg.d_vocab, cfg.d_model)
    transposed_positions = (
        cfg.n_layers <= 8 if cfg.d_model == cfg.n_ctx else renamed["pos_embed.W_pos"].shape[0] == cfg.d_model
    )

    def is_transposed(name: str) -> bool:
        return transposed_positions if name == "pos_embed.W_pos" else all_transposed and ".W_" in name

    return {name: weight.transpose(-2, -1) if is_transposed(name) else weight for name, weight in renamed.items()}


def in_public_names(tensors: Mapping[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Returns weights by TransformerLens names, whichever training code saved them."""
    if "tok_emb.weight" in tensors:
        return from_mingpt(tensors, cfg)
    if any(NORM.search(name) for name in tensors):
        return from_early_solu(tensors, cfg)
    return dict(tensors)


def check_layers_alike(names: Collection[str], cfg: HookedTransformerConfig) -> None:
    """Raises ValueError if a norm or bias, or half of a norm, is there for some layers only.

    What a file lacks of all layers, its training did not have: such norms and biases are identities.
    """
    layers: dict[str, set[int]] = {}
    for name in names:
        if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", name):
            layers.setdefault(match[2], set()).add(int(match[1]))
    missing = [f"'blocks.{layer}.{leaf}'" for leaf, own in layers.items() for layer in {*range(cfg.n_layers)} - own]
    missing += ["'ln_final.w'"] if "ln_final.b" in names and "ln_final.w" not in names else []
    has_bias = "ln1.b" in layers and "ln_final.w" in names and not cfg.final_rms
    missing += ["'ln_final.b'"] if has_bias and "ln_final.b" not in names else []
    if missing:
        raise ValueError(
            f"no {', no '.join(missing[:10])} in the file, which has the same of other layers: it is damaged"
        )
