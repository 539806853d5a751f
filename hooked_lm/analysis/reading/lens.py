"""The logit lens: the model's predictions if the residual stream is unembedded after each layer."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.norms.norm import norm_of, norm_unhooked, upcast
from hooked_lm.components.streams import STREAMS, MergedRMSNorm
from hooked_lm.engine.answers import Answers, answers_of_prompts
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen, position_labels, rows_of
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import Slice
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import Label, stored
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular
from hooked_lm.results.turns import turns_along

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["Lens", "Translator", "decode", "logit_lens"]

MOST_NUMBERS = 2**25  # the maximum number of logits in memory at once: 128 MB in fp32


@runtime_checkable
class Translator(Protocol):
    """A map from the residual stream of a layer to that of the last layer, such as a `TunedLens`."""

    def check(self, model: Any, site: str, layers: Sequence[int]) -> None:
        """Raises ValueError if the translator does not fit the model, site or layers."""

    def __call__(self, stream: Float[Tensor, "*lead d_model"], layer: int) -> Float[Tensor, "*lead d_model"]:
        """The translated stream."""


@dataclass(frozen=True, eq=False, repr=False)
class Lens(Tabular):
    """The predictions of a lens after each layer, at each position of each prompt.

    `tokens` are the ids of the most likely tokens, the most likely first; `logits` and `log_probs` (in nats) are theirs, all
    [layer, position, prompt, rank]. `words` maps ids to strings. `scores` has the axes metric ("entropy" of the lens's
    distribution, and "kl", KL(model || lens), both in nats), layer and position. `answers`, for the requested answers, has
    the axes metric ("logit", "probability", "log_probability", "rank": the number of more likely tokens), answer, layer and
    position.
    """

    tokens: Int[Tensor, "layer position prompt rank"]
    logits: Float[Tensor, "layer position prompt rank"]
    log_probs: Float[Tensor, "layer position prompt rank"]
    scores: Scores
    answers: Scores | None
    words: Mapping[int, str]

    @property
    def axes(self) -> dict[str, Sequence[Label]]:
        """The layers and positions."""
        return {name: labels for name, labels in self.scores.axes.items() if name != "metric"}

    @property
    def about(self) -> Mapping[str, Any]:
        """The model, versions and settings."""
        return self.scores.about

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each layer, position, prompt and rank: `token`, `id`, `logit`, `probability`, `log_probability`."""
        numbered = {"prompt": range(self.tokens.shape[2]), "rank": range(self.tokens.shape[3])}
        table = pd.DataFrame(list(product(*self.axes.values(), *numbered.values())), columns=[*self.axes, *numbered])
        ids, log_probs = self.tokens.flatten(), self.log_probs.flatten()
        return table.assign(
            token=[self.words[token] for token in ids.tolist()],
            id=ids.numpy(),
            logit=self.logits.flatten().numpy(),
            probability=log_probs.exp().numpy(),
            log_probability=log_probs.numpy(),
        )

    def plot(self, title: str = "", prompt: int = 0) -> "go.Figure":
        """Plot the most likely token after each layer (the last at the top) at each position; colour shows its probability.

        On hover a cell shows its `k` tokens and their probabilities. Raises IndexError for a prompt that is out of range.
        """
        from hooked_lm.results.pictures import axis_title, shown
        from hooked_lm.viz import visible
        from hooked_lm.viz.token_views import token_grid

        if not 0 <= prompt < self.tokens.shape[2]:
            raise IndexError(f"prompt {prompt} is out of range: there are {self.tokens.shape[2]}")
        ids, shares = self.tokens[:, :, prompt].flip(0).tolist(), self.log_probs[:, :, prompt].exp().flip(0)

        def lines(tokens: Sequence[int], of: Sequence[float]) -> list[str]:
            return [f"{visible(self.words[token])} {share:.3f}" for token, share in zip(tokens, of, strict=True)]

        return token_grid(
            shares[:, :, 0],
            [[self.words[tokens[0]] for tokens in row] for row in ids],
            x_labels=shown("position", self.axes["position"]),
            y_labels=self.axes["layer"][::-1],
            title=title or self._title(prompt),
            x_title=axis_title("position", self.axes["position"]),
            y_title="layer",
            value_name="probability",
            limit=1.0,
            details=[list(map(lines, *pair)) for pair in zip(ids, shares.tolist(), strict=True)],
            x_turns=turns_along(self.about, self.axes["position"]),
        )

    def _title(self, prompt: int) -> str:
        last, name = self.tokens.shape[2] - 1, str(self.about.get("lens", "lens"))
        which = f", prompt {prompt} of 0 to {last}" if last else ""
        return f"{name[0].upper()}{name[1:]}: most likely next token{which}"

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {"tokens": self.tokens, "logits": self.logits, "log_probs": self.log_probs}
        tensors["scores"] = self.scores.values
        header: dict[str, Any] = {"about": self.about, "axes": {"scores": list(self.scores.axes.items())}}
        if self.answers is not None:
            tensors["answers"], header["axes"]["answers"] = self.answers.values, list(self.answers.axes.items())
        stored.write(path, "hooked_lm.Lens", tensors, {**header, "words": list(self.words.items())})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Lens":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, "hooked_lm.Lens")
        scores = {
            name: Scores(tensors.pop(name), dict(axes), about=header["about"]) for name, axes in header["axes"].items()
        }
        return cls(**tensors, scores=scores["scores"], answers=scores.get("answers"), words=dict(header["words"]))

    def __repr__(self) -> str:
        n_layers, n_positions, n_prompts, k = self.tokens.shape
        shown = "" if self.answers is None else f", answers {', '.join(map(str, self.answers.axes['answer']))}"
        return f"Lens(layer {n_layers}, position {n_positions}, {n_prompts} prompt{'s' * (n_prompts != 1)}, top {k}{shown})"


@torch.no_grad()
@reads_chats
def logit_lens(
    model: Decoder,
    prompts: Prompts | ActivationCache,
    *,
    site: str = "resid_post",
    layers: AxisSelection = "each",
    positions: AxisSelection = "each",
    k: int = 5,
    answers: Answers | None = None,
    lens: Translator | None = None,
) -> Lens:
    """Apply the final norm and the unembedding, with scale and soft cap, to the residual stream after each layer
    (nostalgebraist 2020, "interpreting GPT: the logit lens"). After the last layer the result is the model's output.

    At most 128 MB of logits are in memory at once, independent of the length of the prompts.

    Args:
        prompts: texts or ids [batch, pos] of one length, or the cache of a run with the site and the last residual stream.
        site: the short name of a site of width d_model: "resid_pre", "resid_mid", "resid_post", or the output of a sublayer
            ("attn_out", "mlp_out"), which is then decoded alone. Of a model with several residual streams a site with all of
            them ("streams_pre", "streams_post"), which are merged as before the final norm.
        layers, positions: indices, or "each" for all; negative ones count from the end.
        k: how many of the most likely tokens are kept.
        answers: tokens whose logit, probability and rank are returned: one string or id for all prompts, a list or tensor with
            one for each prompt, or a nested list or tensor [batch, answer] with several (one row: the same for all prompts).
        lens: a map applied to the stream of each layer before decoding, such as a `TunedLens` or a `JacobianLens`.

    Raises ValueError for prompts that are empty or of different lengths, a site of another width, or a lens of another
    model; IndexError for layers and positions out of range; KeyError for a site that the model or the cache lacks.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = logit_lens(
    ...     model, "The capital of France is", positions=[-1], answers=" Paris"
    ... )
    >>> found
    Lens(layer 4, position 1, 1 prompt, top 5, answers  Paris)
    >>> found.to_dataframe().query("layer == 3 and rank == 0")["token"].item()
    ' Paris'
    """
    refuse_two_stacks(model, "logit_lens")
    which = chosen(layers, model.cfg.n_layers, "layer")
    if which is None:
        raise ValueError("a lens looks at each layer alone: layers must be 'each' or some, not None")
    if not 1 <= k <= model.cfg.d_vocab:
        raise ValueError(f"k must be from 1 to {model.cfg.d_vocab}, the size of the vocabulary, got {k}")
    if lens is not None:
        lens.check(model, site, which)
    named = {layer: model.names((site, layer))[0] for layer in which}
    last = model.stack.site_after(model, model.cfg.n_layers - 1)
    streams, labels = _run(model, prompts, [*named.values(), last])
    at = chosen(positions, len(labels), "position")
    if at is None:
        raise ValueError("a lens looks at each position alone: positions must be 'each' or some, not None")
    if isinstance(prompts, ActivationCache) and not isinstance(positions, str):
        prompts.warn_of_padding(Slice(at))
    streams = {name: stream[:, at] for name, stream in streams.items()}
    wanted = None if answers is None else answers_of_prompts(answers, len(streams[last]), "answers", model)
    found: list[dict[str, Tensor]] = []
    for rows in _chunks(streams[last].shape[:2], model.cfg.d_vocab):
        own = _log_probs(decode(model, _rows(streams[last], rows).to(model.device)))
        ids = None if wanted is None else wanted.repeat_interleave(len(at), 0)[rows]
        for layer, name in named.items():
            stream = _rows(streams[name], rows).to(model.device)
            found.append(_read(decode(model, stream if lens is None else lens(stream, layer)), own, k, ids))
    grid = (len(which), len(streams[last]), len(at))
    tensors = {name: _gathered([part[name] for part in found], *grid) for name in found[0]}
    axes: dict[str, Sequence[Label]] = {"layer": which, "position": [labels[pos] for pos in at]}
    about = provenance(model, lens=lens_name(lens), site=site)
    return _result(model, tensors, axes, about, wanted)


def decode(model: Decoder, stream: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_vocab"]:
    """The logits of residual stream vectors: final norm and unembedding without hooks, in fp32 or wider.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits, cache = model.run_with_cache("The capital of France is")
    >>> bool((decode(model, cache["resid_post", -1][0]) - logits[0]).abs().max() < 1e-3)
    True
    """
    normalized = norm_unhooked(norm_of(model, "ln_final"), stream[None]).to(model.embed.W_E.dtype)
    unembed = model.unembed.unhooked if isinstance(model.unembed, Unembed) else model.unembed
    return upcast(model.cap_logits(unembed(normalized))[0])


def _run(
    model: Decoder, prompts: Prompts | ActivationCache, sites: Sequence[str]
) -> tuple[dict[str, Tensor], list[Label]]:
    """The streams at these sites, [batch, pos, d_model], and the labels of their positions."""
    for name in sites:
        dims = model.hook_dict[name].dims
        if dims == ("batch", "pos", "d_model"):
            if name != sites[-1]:
                check_one_stream(model, f"'{name}' alone has no logits")
        elif dims != STREAMS:
            raise ValueError(f"'{name}' [{', '.join(dims)}] is not a residual stream [batch, pos, d_model]")
    if isinstance(prompts, ActivationCache):
        found = {name: prompts[name] if prompts.has_batch_dim else prompts[name][None] for name in sites}
        return _merged(model, found), list(range(found[sites[-1]].shape[1]))
    if not len(prompts):
        raise ValueError("there are no prompts: give at least one text or row of ids")
    tokens = rows_of(model, prompts)
    _, cache = model.run_with_cache(tokens, names_filter=list(sites), return_type=None)
    return _merged(model, {name: cache[name] for name in sites}), position_labels(model, tokens)


def _merged(model: Decoder, streams: dict[str, Tensor]) -> dict[str, Tensor]:
    """The streams, with several made one as before the final norm."""
    final = norm_of(model, "ln_final")
    if not isinstance(final, MergedRMSNorm):
        return streams
    return {
        name: final.merged(stream.to(model.device)) if stream.ndim == len(STREAMS) else stream
        for name, stream in streams.items()
    }


def _chunks(shape: Iterable[int], d_vocab: int) -> Iterator[slice]:
    """Slices of the batch x pos rows whose logits have at most MOST_NUMBERS numbers."""
    batch, n_pos = shape
    step = max(1, MOST_NUMBERS // d_vocab)
    return (slice(start, start + step) for start in range(0, batch * n_pos, step))


def _rows(stream: Float[Tensor, "batch pos d_model"], rows: slice) -> Float[Tensor, "row d_model"]:
    return stream.flatten(0, 1)[rows]


def _log_probs(logits: Float[Tensor, "row d_vocab"]) -> Float[Tensor, "row d_vocab"]:
    return logits.log_softmax(-1)


def _read(
    logits: Float[Tensor, "row d_vocab"],
    own: Float[Tensor, "row d_vocab"],
    k: int,
    answers: Int[Tensor, "row answer"] | None,
) -> dict[str, Float[Tensor, "row n"] | Int[Tensor, "row n"]]:
    """The results for the lens logits of some rows; `own` are the model's log probabilities there."""
    log_probs = _log_probs(logits)
    top = logits.topk(k, -1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    kl = (own.exp() * (own - log_probs)).sum(-1)
    found = {
        "tokens": top.indices,
        "logits": top.values,
        "log_probs": log_probs.gather(-1, top.indices),
        "scores": torch.stack([entropy, kl], -1),
    }
    if answers is not None:
        of_answers = logits.gather(-1, answers)
        likely = log_probs.gather(-1, answers)
        ranks = torch.stack([(logits > one[:, None]).sum(-1) for one in of_answers.unbind(-1)], -1)
        found["answers"] = torch.stack([of_answers, likely.exp(), likely, ranks.to(likely)], -1).flatten(1)
    return {name: value.cpu() for name, value in found.items()}


def _gathered(parts: list[Tensor], n_layers: int, batch: int, n_pos: int) -> Tensor:
    """Concatenate chunks of rows, each with all layers, into [layer, position, prompt, n]."""
    rows = torch.cat([torch.stack(parts[i : i + n_layers]) for i in range(0, len(parts), n_layers)], 1)
    return rows.view(n_layers, batch, n_pos, -1).transpose(1, 2).contiguous()


def _result(
    model: Decoder,
    tensors: dict[str, Tensor],
    axes: Mapping[str, Sequence[Label]],
    about: dict[str, Any],
    answers: Int[Tensor, "batch answer"] | None,
) -> Lens:
    scores = Scores(tensors.pop("scores").movedim(-1, 0), {"metric": ["entropy", "kl"], **axes}, about=about)
    of_answers = None
    if answers is not None:
        values = tensors.pop("answers").unflatten(-1, (-1, 4)).permute(4, 3, 0, 1, 2)
        labels = _labels(model, answers)
        metrics = ["logit", "probability", "log_probability", "rank"]
        of_answers = Scores(values, {"metric": metrics, "answer": labels, **axes}, about=about)
    words = spelled(model, tensors["tokens"])
    return Lens(**tensors, scores=scores, answers=of_answers, words=words)


def _labels(model: Decoder, answers: Int[Tensor, "batch answer"]) -> list[Label]:
    """The words of the answers; numbers if there are others for each prompt."""
    if len(answers) > 1 and bool((answers != answers[0]).any()):
        return [f"answer {i}" for i in range(answers.shape[1])]
    words = spelled(model, answers[0])
    return [words[token] for token in answers[0].tolist()]


def spelled(model: Decoder, tokens: Tensor) -> dict[int, str]:
    """The strings of token ids; the ids as strings without a tokenizer."""
    ids = tokens.unique().tolist()
    if getattr(model, "tokenizer", None) is None:
        return {token: str(token) for token in ids}
    return {token: model.to_single_str_token(token) for token in ids}


def lens_name(lens: Translator | None) -> str:
    """What a lens is called: its name, or its class in words, such as "tuned lens"."""
    if lens is None:
        return "logit lens"
    return str(getattr(lens, "name", "")) or re.sub("(?<=[a-z])(?=[A-Z])", " ", type(lens).__name__).lower()
