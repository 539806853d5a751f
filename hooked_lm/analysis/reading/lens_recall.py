"""How often a lens shows a token that is known, by layer: what the model says later, or an intermediate result."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.analysis.reading.lens import Translator, logit_lens
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.prompts import AxisSelection, Messages, chosen
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import provenance

__all__ = ["lens_recall"]

Texts = str | Sequence[str] | Sequence[Tensor] | Int[Tensor, "prompt pos"] | Chat | Messages


@torch.no_grad()
@reads_chats
def lens_recall(
    model: Decoder,
    prompts: Texts,
    answers: Sequence[str | int] | Int[Tensor, " prompt"],
    lenses: Mapping[str, Translator | None],
    *,
    candidates: Sequence[str | int] | None = None,
    k: int = 1,
    site: str = "resid_post",
    layers: AxisSelection = "each",
    positions: int = -1,
    groups: Groups = None,
) -> MetricScores:
    """The share of prompts whose answer is among the `k` tokens that a lens finds most likely, for each lens and layer.

    The answer need not be the next token: what a model has worked out already it may say later. Beside lenses that were fitted
    give `None`, the logit lens, and `lens.rotated()`, a random one; by chance the share is k of the number of candidates. An
    answer that ties with the token after the `k` is not counted: a lens that tells no tokens apart finds none.

    Args:
        prompts: texts, rows of ids, or conversations; their lengths may differ.
        answers: the token of each prompt.
        lenses: by name; `None` is the logit lens.
        candidates: the tokens that are compared, such as all digits; None: the vocabulary.
        positions: where the lens reads, -1 for the last token of each; in conversations a column of the `Chat`.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).

    Returns scores with the axes lens and layer, whose intervals are Wilson's. Raises ValueError for an answer that is no
    candidate, and as `logit_lens`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = [f"The capital of {country} is" for country in ("France", "Spain")]
    >>> found = lens_recall(model, texts, [" Paris", " Madrid"], {"logit lens": None})
    >>> found.select(layer=3).mean
    tensor([1.])
    """
    which = chosen(layers, model.cfg.n_layers, "layer")
    if which is None:
        raise ValueError("recall is of each layer alone: layers must be 'each' or some, not None")
    right = model.tokens.single_token_ids(answers).reshape(-1).cpu()
    n_prompts = 1 if isinstance(prompts, str) else len(prompts)
    if n_prompts != len(right):
        raise ValueError(f"there are {n_prompts} prompts and {len(right)} answers: give one for each prompt")
    others = None if candidates is None else model.tokens.single_token_ids(candidates).reshape(-1).cpu()
    most = model.cfg.d_vocab if others is None else len(others)
    if not 1 <= k < most:
        raise ValueError(f"k must be from 1 to {most - 1}, one less than the tokens that are compared, got {k}")
    if others is not None and (strange := [token for token in right.tolist() if token not in others.tolist()]):
        raise ValueError(f"the answer {strange[0]} is none of the candidates {others.tolist()}")
    found = torch.full((len(lenses), len(which), n_prompts), torch.nan)
    if isinstance(prompts, Chat) and positions >= 0:
        positions -= prompts.tokens.shape[1]  # they are padded on the left
    for same, batch in _batches(model, prompts):
        wanted = right[same][:, None] if others is None else others.expand(len(same), -1)
        for place, lens in enumerate(lenses.values()):
            read = logit_lens(
                model, batch, answers=wanted, site=site, layers=which, positions=[positions], k=k + 1, lens=lens
            )
            assert read.answers is not None, "answers were asked for"
            logits = read.answers.select(metric="logit").values[:, :, 0]  # [answer, layer, prompt]
            if others is None:
                own, next_best = logits[0], read.logits[:, 0, :, k]
            else:
                which_one = (right[same][:, None] == others).int().argmax(1)
                own = logits.gather(0, which_one.expand(1, *logits.shape[1:]))[0]
                next_best = logits.topk(k + 1, 0).values[k]
            found[place][:, same] = (own > next_best).float()
    about = provenance(model, of=f"recall at {k}", site=site, candidates=most, chance=k / most)
    return MetricScores(
        found, {"lens": list(lenses), "layer": which}, [True], about=about, groups=checked_groups(groups, n_prompts)
    )


def _batches(model: Decoder, prompts: Texts) -> list[tuple[list[int], Int[Tensor, "batch pos"] | Chat]]:
    """The places of prompts of one length, and these prompts."""
    if isinstance(prompts, Chat):
        return [(same, prompts[same]) for same in _of_one_length(prompts.attention_mask.sum(1).tolist())]
    several: Any = [prompts] if isinstance(prompts, str) else prompts
    rows = [model.to_tokens(one) if isinstance(one, str) else one.reshape(1, -1) for one in several]
    return [(same, torch.cat([rows[i] for i in same])) for same in _of_one_length([row.shape[1] for row in rows])]


def _of_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """The places of each length."""
    return [[i for i, n in enumerate(lengths) if n == length] for length in dict.fromkeys(lengths)]
