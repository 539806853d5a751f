"""Saliency of input tokens: how much each token of the input matters for each generated token, by gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.gradients import gradients
from hooked_lm.analysis.attribution.integrated import batched, inputs_of, mean_of, moved
from hooked_lm.callers import warn_caller
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import rows_of
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import PromptRows, VisionInputs, ids_of, repeated_rows
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.results import stored
from hooked_lm.results.scores import provenance
from hooked_lm.results.turns import turns_along, turns_read_now

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from hooked_lm.viz import View

__all__ = ["Saliency", "saliency"]

METHODS = ("gradient", "gradient x input", "integrated gradients")
TARGETS = ("probability", "log probability", "logit", "logit difference")
VARIANTS = ("signed", "norm")
BASELINES = ("zero", "mean")
ROWS = 32  # of tokens that run together

Grid = Float[Tensor, "generated input"]


@dataclass(frozen=True, eq=False, repr=False)
class Saliency:
    """The saliency of each input token for each generated token.

    `signed` [generated, input] are sums over the entries of the embedding, `norm` are L2 norms. Both are NaN for the generated
    token itself and what follows it, which it cannot depend on. `tokens` are the strings of the prompt and of what was generated,
    `start` the position of the first generated token. `scores` [generated] are the values of the target that was attributed, and
    `baseline_scores` its values if all embeddings are those of the baseline (NaN but for integrated gradients).
    """

    signed: Grid
    norm: Grid
    scores: Float[Tensor, " generated"]
    baseline_scores: Float[Tensor, " generated"]
    tokens: Sequence[str]
    start: int
    about: dict[str, Any]

    @property
    def generated(self) -> Sequence[str]:
        """The generated tokens."""
        return self.tokens[self.start :]

    @property
    def gap(self) -> Float[Tensor, " generated"]:
        """The completeness error of integrated gradients: the sum of `signed` less the difference of scores; NaN otherwise."""
        return self.signed.nansum(-1) - (self.scores - self.baseline_scores)

    def values(self, variant: str = "signed") -> Grid:
        """`signed` or `norm`. Raises ValueError for another word."""
        _check("variant", variant, VARIANTS)
        return self.norm if variant == "norm" else self.signed

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each generated token and each input token before it: strings, positions, `signed`, `norm`."""
        import pandas as pd

        pairs = [(i, j) for i, j in product(range(len(self.generated)), range(len(self.tokens))) if j < self.start + i]
        rows, columns = (torch.tensor(part, dtype=torch.long) for part in zip(*pairs, strict=True))
        return pd.DataFrame(
            {
                "generated": [self.generated[i] for i, _ in pairs],
                "generated_position": [self.start + i for i, _ in pairs],
                "input": [self.tokens[j] for _, j in pairs],
                "input_position": [j for _, j in pairs],
                "signed": self.signed[rows, columns].numpy(),
                "norm": self.norm[rows, columns].numpy(),
            }
        )

    def plot(self, variant: str = "signed", title: str = "") -> "go.Figure":
        """A heat map with a row for each generated token and a column for each input token."""
        from hooked_lm import viz

        return viz.heatmap(
            self.values(variant)[:, :-1],
            x_labels=self.tokens[:-1],
            y_labels=self.generated,
            title=title or f"Saliency: {self._title()}",
            x_title="input",
            y_title="generated",
            value_name=variant,
            x_turns=turns_along(self.about, range(len(self.tokens) - 1)),
        )

    def view(self, variant: str = "signed", title: str = "") -> "View":
        """The text, coloured by the saliency for one generated token, which buttons choose."""
        from hooked_lm import viz

        names = [f"{token} ({self.start + i})" for i, token in enumerate(self.generated)]
        return viz.tokens(self.tokens, self.values(variant), names, title=title or f"Saliency: {self._title()}")

    def _title(self) -> str:
        return f"{self.about.get('method')} of the {self.about.get('of')}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.view()._repr_html_()}"

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {name: getattr(self, name) for name in ("signed", "norm", "scores", "baseline_scores")}
        stored.write(
            path, "hooked_lm.Saliency", tensors, {"tokens": list(self.tokens), "start": self.start, "about": self.about}
        )

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Saliency":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, "hooked_lm.Saliency")
        return cls(**tensors, tokens=header["tokens"], start=header["start"], about=header["about"])

    def __repr__(self) -> str:
        n, gap = len(self.generated), float(self.gap.abs().max())
        error = "" if math.isnan(gap) else f", completeness error at most {gap:.2g}"
        return f"Saliency({self._title()}: {n} generated token{'s' * (n != 1)}, {self.start} of the prompt{error})"


@reads_chats
def saliency(
    model: Decoder,
    prompt: str | Int[Tensor, "..."] | VisionInputs | Chat,
    *,
    max_new_tokens: int | None = None,
    continuation: str | Int[Tensor, "..."] | None = None,
    method: str = "gradient x input",
    of: str = "probability",
    contrast: str | int | Sequence[str | int] | None = None,
    baseline: str = "mean",
    steps: int = 64,
    backward: str | BackwardRules = "plain",
) -> Saliency:
    """How much each token of the input, and each token generated before, matters for each generated token.

    The gradient of a target at each generated token is taken with respect to the token embeddings: alone ("gradient"; Simonyan
    et al. 2014, arXiv:1312.6034), times the embedding ("gradient x input"), or averaged along a line from a baseline to the
    embeddings and times their difference ("integrated gradients"; Sundararajan et al. 2017, arXiv:1703.01365). The signed values
    of the latter sum to the target less its value at the baseline; `gap` is what is missing, and falls with more steps.

    One prompt has no standard error: nothing says whether the target differs from 0 by more than chance, as the logit difference
    of an untrained model does not. Read `scores`, and compare several prompts.

    Args:
        prompt: one text, or ids [pos] or [1, pos]; `VisionInputs` for a model that reads images, whose tokens then count as
            input tokens.
        max_new_tokens: generate so many tokens, the most likely each time (fewer if the model ends the text).
        continuation: or the tokens that follow the prompt, as text or ids.
        of: the target: the "probability" of the generated token, its "log probability" or "logit" at the position before, or
            the "logit difference" from `contrast`: one token for all, or one for each generated token.
        baseline: for integrated gradients: "mean", the mean embedding of the vocabulary, or "zero". A norm has steep gradients
            near zero embeddings, which need many more steps.
        steps: the number of points along the line (Gauss-Legendre).
        backward: what the backward pass uses in place of derivatives, as for `attribute`: "relp" (layer-wise relevance
            propagation, with "gradient x input"), "gim", or rules of your own.

    Raises ValueError for several prompts, for both or none of `max_new_tokens` and `continuation`, for unknown words, and for a
    contrast that does not fit the target; TypeError for an encoder-decoder, whose inputs are two texts, and a dual encoder.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> found = saliency(
    ...     model, prompt, continuation=" Mary", of="logit difference", contrast=" John"
    ... )
    >>> found
    Saliency(gradient x input of the logit difference: 1 generated token, 15 of the prompt)
    """
    refuse_two_stacks(model, "saliency")
    if isinstance(prompt, list | tuple):
        raise ValueError(f"saliency is of one prompt at a time, got {len(prompt)}: call it for each, without padding")
    _check("method", method, METHODS)
    _check("of", of, TARGETS)
    _check("baseline", baseline, BASELINES)
    if (of == "logit difference") != (contrast is not None):
        raise ValueError("a logit difference needs contrast, the other token; other targets have none")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    rules = BackwardRules.of(backward)
    whole, start = _continued(model, prompt, max_new_tokens, continuation)
    ids = ids_of(whole)
    n = ids.shape[1] - start
    wrong = None if contrast is None else _contrast(model, contrast, n)
    rows = [
        _row_of(model, whole, start, i, of, None if wrong is None else wrong[i], method, baseline, steps, rules)
        for i in range(n)
    ]
    parts = torch.stack([row[0] for row in rows])
    later = torch.arange(ids.shape[1]) >= torch.arange(start, ids.shape[1])[:, None]
    signed, norm = (part.masked_fill(later, torch.nan) for part in (parts.sum(-1), parts.norm(dim=-1)))
    scores, bases = (torch.stack([row[k] for row in rows]) for k in (1, 2))
    settings: dict[str, Any] = {"baseline": baseline, "steps": steps} if method == METHODS[2] else {}
    settings |= {"backward": rules.settings} if rules.settings else {}
    about = provenance(model, method=method, of=of, **settings)
    has_tokenizer = getattr(model, "tokenizer", None) is not None
    words = [model.to_single_str_token(int(token)) if has_tokenizer else str(int(token)) for token in ids[0]]
    return Saliency(signed, norm, scores, bases, words, start, {**about, **turns_read_now()})


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _continued(
    model: Decoder,
    prompt: str | Int[Tensor, "..."] | VisionInputs | Chat,
    max_new_tokens: int | None,
    continuation: str | Int[Tensor, "..."] | None,
) -> tuple[PromptRows, int]:
    """The prompt with what follows it, and the position of the first generated token."""
    given = rows_of(model, prompt, "prompt").to(model.device)
    ids = ids_of(given)
    if len(ids) != 1:
        raise ValueError(f"saliency is of one prompt at a time, got {len(ids)}: call it for each, without padding")
    if (max_new_tokens is None) == (continuation is None):
        raise ValueError("give max_new_tokens, to generate, or continuation, the text that follows the prompt")
    if max_new_tokens is not None:
        whole = model.generate(given, max_new_tokens=max_new_tokens, do_sample=False, verbose=False)
    else:
        assert continuation is not None, "one of both is given"
        if isinstance(continuation, str):
            _warn_if_without_space(model, given, continuation)
            continuation = model.to_tokens(continuation, prepend_bos=False)
        whole = torch.cat([ids, torch.atleast_2d(continuation).to(ids)], 1)
    if whole.shape[1] == ids.shape[1]:
        raise ValueError("no token follows the prompt: max_new_tokens or continuation is empty")
    return _among_images(model, given, whole), ids.shape[1]


@torch.no_grad()
def _warn_if_without_space(model: Decoder, prompt: PromptRows, continuation: str) -> None:
    """Warns of a continuation that lacks the space of a word, where the token with it is likelier after the prompt."""
    if tokens := model.tokens.without_space(continuation):
        first, spaced = model(prompt)[0, -1, [*tokens]]
        if spaced > first:
            warn_caller(
                f"the continuation {continuation!r} has no leading space, and is less likely after the prompt than with one: did "
                f"you mean {f' {continuation}'!r}?"
            )


def _among_images(model: Decoder, prompt: PromptRows, ids: Int[Tensor, "1 pos"]) -> PromptRows:
    """The ids, with the images of their prompt if it has some: tokens after it are words, which it does not read."""
    if not isinstance(prompt, VisionInputs):
        return ids
    assert isinstance(model, VisionLanguage), "a model that reads images"
    after = torch.arange(ids.shape[1], device=ids.device)[None] >= prompt.tokens.shape[1]
    n = ids.shape[1] - prompt.tokens.shape[1]
    is_image = None if prompt.is_image is None else F.pad(prompt.is_image, (0, n))
    is_suffix = None if prompt.is_suffix is None else F.pad(prompt.is_suffix, (0, n), value=True)
    if is_suffix is None and model.reads_both_ways:
        is_suffix = after
    return replace(prompt, tokens=ids, attention_mask=None, is_image=is_image, is_suffix=is_suffix)


def _before(rows: PromptRows, at: int) -> PromptRows:
    """The tokens before a position of the continuation."""
    if not isinstance(rows, VisionInputs):
        return rows[:, :at]
    cut: dict[str, Any] = {name: value[:, :at] for name, value in rows.of_rows().items()}
    return replace(rows, **cut)


def _contrast(model: Decoder, contrast: str | int | Sequence[str | int], n: int) -> list[int]:
    several = [contrast] * n if isinstance(contrast, str | int) else list(contrast)
    if len(several) != n:
        raise ValueError(f"{len(several)} contrasts for {n} generated tokens: give one for each, or one for all")
    return [int(model.tokens.answer_ids(token, "contrast")) for token in several]


def _row_of(
    model: Decoder,
    rows: PromptRows,
    start: int,
    i: int,
    of: str,
    wrong: int | None,
    method: str,
    baseline: str,
    steps: int,
    rules: BackwardRules,
) -> tuple[Float[Tensor, "pos d_model"], Float[Tensor, ""], Float[Tensor, ""]]:
    """The saliency of every input for the i-th generated token, its score, and the score of the baseline."""
    at, ids = start + i, ids_of(rows)
    site = inputs_of(model, "hook_embed")[0]
    metric = partial(_target, position=at - 1, right=int(ids[0, at]), wrong=wrong, of=of)
    before = _before(rows, at)
    run = gradients(model, before, [site], metric, rules=rules)
    values, slopes = run.values[site], run.gradients[site]
    base = torch.tensor(torch.nan)
    if method == "integrated gradients":
        zero = torch.zeros_like(values)
        target = zero if baseline == "zero" else zero + model.W_E.detach().mean(0).to(values)
        change, total = target - values, torch.zeros_like(values)
        for shares, weights in batched(steps, ROWS):
            hooks = [(site, moved(change, shares))]
            many = gradients(model, repeated_rows(before, len(shares)), [site], metric, hooks, rules=rules)
            total += mean_of(many.gradients[site], weights)
        parts = -total * change
        whole = [(site, moved(change, torch.ones(1)))]
        base = gradients(model, before, [site], metric, whole, check=False).scores[0].cpu()
    else:
        parts = slopes * values if method == "gradient x input" else slopes
    found = parts.new_zeros(ids.shape[1], parts.shape[-1])
    found[:at] = parts[0]
    return found.float().cpu(), run.scores[0].float().cpu(), base.float()


def _target(
    logits: Float[Tensor, "batch pos d_vocab"], position: int, right: int, wrong: int | None, of: str
) -> Float[Tensor, " batch"]:
    """The number that is attributed, for each row."""
    last = logits[:, position].float()
    if of == "logit":
        return last[:, right]
    if wrong is not None:
        return last[:, right] - last[:, wrong]
    likely = last.log_softmax(-1)[:, right]
    return likely if of == "log probability" else likely.exp()
