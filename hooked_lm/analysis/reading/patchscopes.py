"""Patchscopes: patch a hidden state of one run into another prompt, and let the model continue that prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.continuations import continued, one_prompt, texts_of
from hooked_lm.analysis.reading.lens import spelled
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen, values_of
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import stored
from hooked_lm.results.scores import provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["IDENTITY_PROMPT", "Patchscope", "patchscope"]

IDENTITY_PROMPT = "cat -> cat; 135 -> 135; hello -> hello; ?"

Mapping = Callable[[Float[Tensor, "layer d_source"]], Float[Tensor, "layer d_target"]]


@dataclass(frozen=True, eq=False, repr=False)
class Patchscope(Tabular):
    """The continuations generated with the state of each source layer patched into each target layer.

    `tokens` [source, target, new] are ids. `texts` are their strings, a list for each source layer (None without a tokenizer).
    `unpatched` are the ids of the continuation without patching. If `target_layers` is None, each state was patched into its
    source layer.
    """

    tokens: Int[Tensor, "source target new"]
    unpatched: Int[Tensor, " new"]
    source_layers: tuple[int, ...]
    target_layers: tuple[int, ...] | None
    texts: list[list[str | None]]
    words: dict[int, str]
    about: dict[str, Any]

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each pair of layers: `source_layer`, `target_layer`, `text`, `tokens` (the new tokens), `first` (the first of
        them) and `changed` (whether they differ from the continuation without patching)."""
        rows = []
        for (i, source), j in product(enumerate(self.source_layers), range(self.tokens.shape[1])):
            new = self.tokens[i, j].tolist()
            rows.append(
                {
                    "source_layer": source,
                    "target_layer": source if self.target_layers is None else self.target_layers[j],
                    "text": self.texts[i][j],
                    "tokens": [self.words[token] for token in new],
                    "first": self.words[new[0]],
                    "changed": new != self.unpatched.tolist(),
                }
            )
        return pd.DataFrame(rows)

    def plot(self, title: str = "") -> "go.Figure":
        """Plot the first new token of each pair of layers; colour shows the fraction of new tokens that the patch changed."""
        from hooked_lm.viz.token_views import token_grid

        changed = (self.tokens != self.unpatched).float().mean(-1)
        targets = ["its own"] if self.target_layers is None else self.target_layers
        return token_grid(
            changed.flip(0),
            [[self.words[token] for token in row] for row in self.tokens[..., 0].flip(0).tolist()],
            x_labels=targets,
            y_labels=self.source_layers[::-1],
            title=title or "Patchscope: first new token",
            x_title="target layer",
            y_title="source layer",
            value_name="share changed",
            limit=1.0,
        )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it."""
        header = {name: getattr(self, name) for name in ("source_layers", "target_layers", "texts", "about")}
        header["words"] = list(self.words.items())
        stored.write(path, "hooked_lm.Patchscope", {"tokens": self.tokens, "unpatched": self.unpatched}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Patchscope":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, "hooked_lm.Patchscope")
        targets = header["target_layers"]
        layers = tuple(header["source_layers"]), None if targets is None else tuple(targets)
        return cls(
            tensors["tokens"], tensors["unpatched"], *layers, header["texts"], dict(header["words"]), header["about"]
        )

    def __repr__(self) -> str:
        targets = "its own layer" if self.target_layers is None else f"{len(self.target_layers)} target layers"
        changed = (self.tokens != self.unpatched).any(-1).sum()
        n, cells = self.tokens.shape[-1], self.tokens[..., 0].numel()
        return f"Patchscope({len(self.source_layers)} source layers to {targets}, {n} new tokens; {changed} of {cells} changed)"


@torch.no_grad()
@reads_chats
def patchscope(
    model: Decoder,
    source_prompt: Prompts,
    target_prompt: Prompts = IDENTITY_PROMPT,
    *,
    source_positions: int = -1,
    target_positions: int = -1,
    source_layers: AxisSelection = "each",
    target_layers: AxisSelection = None,
    max_new_tokens: int = 5,
    site: str = "resid_post",
    target_site: str | None = None,
    target_model: Decoder | None = None,
    mapping: Mapping | None = None,
) -> Patchscope:
    """Decode hidden states by text generation (Ghandeharioun et al. 2024, arXiv:2401.06102).

    The residual stream of the source prompt, at one position after each source layer, replaces that of the target prompt at one
    position after a target layer. Then greedy decoding continues the target prompt. Only this position of the prompt is patched;
    generated tokens see it through attention. The target prompt should make the model repeat or describe the state, as
    `IDENTITY_PROMPT` does with few-shot repetitions, which the model must be able to follow.

    Args:
        source_prompt, target_prompt: one text or row of ids each; `VisionInputs` for a model that reads images.
        source_layers, target_layers: the axes of the grid; without target layers each state is patched into its source layer.
        max_new_tokens: the number of generated tokens; an end-of-sequence token does not stop generation.
        site: the short name of the site that is copied and replaced, [batch, pos, d_model]. Of a vision tower, as
            "vision.resid_post", it has its layers, and patches as positions; the prompt then has one image.
        target_site: the site that is replaced, if another one.
        target_model: the model of the target prompt, with its tokenizer; None: `model`.
        mapping: maps states [layer, d_model] to those of the target model; required if the widths differ.

    Raises IndexError for layers and positions out of range; ValueError for more than one prompt, widths that differ, a mapping to
    another width, or a target prompt that leaves no room in n_ctx.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = patchscope(
    ...     model, "The capital of France is", "The capital of Spain is", max_new_tokens=1
    ... )
    >>> found.to_dataframe()["first"].tolist()[-1]
    ' Paris'
    """
    reader = target_model or model
    for each in (model, reader):
        refuse_two_stacks(each, "patchscope")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    written = target_site or site
    sources = _all_or_some(source_layers, model.stack_of(site)[1], "source layer")
    n_target = reader.stack_of(written)[1]
    targets = None if target_layers is None else _all_or_some(target_layers, n_target, "target layer")
    if targets is None and max(sources) >= n_target:
        raise IndexError(f"the target model has {n_target} layers, so no layer {max(sources)}: give target_layers")
    names = [model.names((site, layer))[0] for layer in sources]
    places = {layer: reader.names((written, layer))[0] for layer in (targets or sources)}
    source, at = one_prompt(model, source_prompt, source_positions, "source", names[0])
    target, to = one_prompt(reader, target_prompt, target_positions, "target", next(iter(places.values())))
    for owner, some in ((model, names), (reader, places.values())):
        for name in some:
            if owner.hook_dict[name].dims != ("batch", "pos", "d_model"):
                raise ValueError(
                    f"'{name}' [{', '.join(owner.hook_dict[name].dims)}] is not a residual stream [batch, pos, d_model]"
                )
    values = values_of(model, source, names)
    states = _mapped(torch.stack([values[name][0, at] for name in names]), mapping, reader)
    cells = [(i, layer) for i, own in enumerate(sources) for layer in ([own] if targets is None else targets)]
    new = continued(reader, target, to, [(states[i], places[layer]) for i, layer in cells], max_new_tokens)
    unpatched = continued(reader, target, to, [(None, "")], max_new_tokens)[0]
    tokens = new.view(len(sources), -1, max_new_tokens)
    settings = {"source_positions": at, "target_positions": to, "site": site, "target_site": written}
    settings |= {"target_model": provenance(reader)["model"]}
    return Patchscope(
        tokens, unpatched, tuple(sources), None if targets is None else tuple(targets), texts_of(reader, tokens),
        spelled(reader, torch.cat([tokens.flatten(), unpatched])), provenance(model, **settings),
    )  # fmt: skip


def _all_or_some(layers: AxisSelection, n_layers: int, what: str) -> list[int]:
    which = chosen(layers, n_layers, what)
    if which is None:
        raise ValueError(f"{what}s must be 'each' or some")
    return which


def _mapped(
    states: Float[Tensor, "layer d_source"], mapping: Mapping | None, reader: Decoder
) -> Float[Tensor, "layer d_target"]:
    """The mapped states on the target model's device; raises ValueError if their width is not its d_model."""
    wanted = (len(states), reader.cfg.d_model)
    found = states if mapping is None else mapping(states)
    if tuple(found.shape) != wanted:
        how = "give mapping=..., from [layer, d_model] to that" if mapping is None else "the mapping gave another width"
        raise ValueError(f"the states are {list(found.shape)}, the target model reads {list(wanted)}: {how}")
    return found.to(reader.device)
