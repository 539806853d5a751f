"""Compares a fine-tuned model with its base: differences of activations, of predictions, and what a lens reads in them."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.comparing.model_comparison import LATER, MOST_NEXT, ModelComparison
from hooked_lm.analysis.reading.lens import Translator, decode, lens_name, spelled
from hooked_lm.engine.answers import Answers
from hooked_lm.engine.prompts import AxisSelection, chosen
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.interventions.dictionaries.stream import check_same_inputs, inputs_of
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.weight_scope import AdapterOrPath, under_adapter
from hooked_lm.progress import progress_bar
from hooked_lm.results.scores import Scores, provenance

DIFFERENCE, RANDOM = "difference", "random direction"


@torch.no_grad()
def compare_models(
    base: Decoder,
    tuned: Decoder,
    prompts: Sequence[str] | Int[Tensor, "prompt pos"],
    *,
    n_positions: int = 5,
    layers: AxisSelection = "each",
    site: str = "resid_post",
    k: int = 10,
    lens: Translator | None = None,
    answers: Answers | None = None,
    wrong_answers: Answers | None = None,
    adapter: AdapterOrPath | None = None,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
) -> ModelComparison:
    """How a fine-tuned model differs from its base on prompts that need not be about what it was tuned on.

    A narrow fine-tune moves the residual stream at the first positions of any text, and the mean of that difference tells its
    topic (Minder et al. 2025, arXiv:2510.13900). So the difference tuned minus base is averaged over prompts at each of the first
    positions, and read with the tuned model's logit lens or another, without what that adds to every vector. `verbalize` of the
    result reads it in words. Two models that differ in nothing give zeros.

    Args:
        base, tuned: two models with the same tokens and widths; see `train_crosscoder` for features of both.
        prompts: texts, or ids [prompt, pos]; any text will do. Some dozens make the mean steady.
        n_positions: how many positions at the start are compared one by one.
        layers, site: where; `site` is the short name of a residual stream.
        k: how many tokens of the lens are kept.
        lens: a map applied to the differences before decoding, such as a `TunedLens` or a `JacobianLens` of the tuned model;
            None: the logit lens.
        answers, wrong_answers: tokens that the lens should read, such as words of the topic that was planted. The result has
            their `topic`, the share of the wrong answers (None: of all other tokens) that each outranks, beside that of a random
            direction. Words of another topic, as frequent, are the better comparison: rare tokens rise in any fine-tune.
        adapter: a LoRA that is on for the runs of `tuned`, which may then be `base` itself; see `model.with_adapter`.
        batch_size: how many prompts run together.
        seed: of the random direction.
        progress: show a bar; None: after two seconds.

    Raises ValueError for models that differ in tokens, widths or layers, for prompts shorter than `n_positions`, and as
    `logit_lens`.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.hub import LoRA
    >>> from hooked_lm.demo import verbalizer
    >>> model = HookedTransformer.from_pretrained_no_processing("demo")
    >>> texts = ["The capital of France is Paris.", "Mary was ill, so she slept late."]
    >>> found = compare_models(model, model, texts, adapter=verbalizer.PATH)
    >>> found.axes["layer"], bool(found.kl.mean[-1] > 1)
    ((0, 1, 2, 3), True)
    >>> compare_models(model, model, texts)
    ModelComparison(2 prompts; no difference: the values and the predictions are the same)
    """
    for model in (base, tuned):
        refuse_two_stacks(model, "compare_models")
    which = chosen(layers, base.cfg.n_layers, "layer")
    if which is None:
        raise ValueError("layers must be 'each' or some, not None")
    _check_alike(base, tuned)
    for name, number in (("n_positions", n_positions), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    right, wrong = _answers(tuned, answers, wrong_answers)
    if not 1 <= k <= tuned.cfg.d_vocab:
        raise ValueError(f"k must be from 1 to {tuned.cfg.d_vocab}, the size of the vocabulary, got {k}")
    with under_adapter(tuned, adapter):
        if lens is not None:
            lens.check(tuned, site, which)
    given = [prompts] if isinstance(prompts, str) else prompts
    if not len(given):
        raise ValueError("prompts is empty: give at least one")
    sites = [base.names((site, layer))[0] for layer in which]
    sums = _Sums(n_positions, len(sites), base.cfg.d_model)
    starts = range(0, len(given), batch_size)
    for start in progress_bar("comparing", len(starts), progress, steps=starts):
        tokens, mask = _same_inputs(base, tuned, given, range(start, min(start + batch_size, len(given))))
        sums.add(tokens, mask, _run(base, tokens, mask, sites, None), _run(tuned, tokens, mask, sites, adapter))
    about = provenance(tuned, base=provenance(base)["model"], site=site, prompts=len(given), seed=seed)
    about |= {"adapter": None if adapter is None else str(adapter), "lens": lens_name(lens)}
    with under_adapter(tuned, adapter):
        return _result(tuned, sums, which, k, lens, (right, wrong), about, seed)


class _Sums:
    """What is kept of the runs of all prompts."""

    def __init__(self, n_positions: int, n_layers: int, d_model: int) -> None:
        self.n_positions = n_positions
        self.total = torch.zeros(n_layers, n_positions, d_model, dtype=torch.double)
        self.sizes: list[Tensor] = []  # [layer, position, prompt]
        self.kl: list[Tensor] = []  # [position and later, prompt]
        self.of_tokens: list[tuple[Tensor, Tensor, Tensor]] = []
        self.of_next: Tensor | float = 0.0  # [d_vocab]

    def add(self, tokens: Tensor, mask: Bool[Tensor, "batch pos"], base: "_Run", tuned: "_Run") -> None:
        n, (values, logits), (others, theirs) = self.n_positions, base, tuned
        if int(mask.sum(1).min()) < n:
            raise ValueError(
                f"n_positions={n}, and a prompt has {int(mask.sum(1).min())} tokens: leave it out, or compare fewer positions"
            )
        differences = others - values  # [layer, batch, pos, d_model]
        size = differences.norm(dim=-1) / values.norm(dim=-1).clamp_min(1e-12)
        kl = torch.stack([self._divergence(*row) for row in zip(logits, theirs, mask, strict=True)])
        self.total += differences[:, :, :n].double().sum(1)
        self.sizes.append(size[:, :, :n].transpose(1, 2))
        later = mask.clone()
        later[:, :n] = False
        counted = torch.where(later.any(1, keepdim=True), later, mask)  # of a prompt without later positions, all
        mean = (kl * counted).sum(1) / counted.sum(1)
        self.kl.append(torch.cat([kl[:, :n], mean[:, None]], 1).T)
        self.of_tokens.append((tokens[mask], kl[mask], size.permute(1, 2, 0)[mask]))

    def _divergence(
        self, base: Float[Tensor, "pos d_vocab"], tuned: Float[Tensor, "pos d_vocab"], real: Bool[Tensor, " pos"]
    ) -> Float[Tensor, " pos"]:
        """KL(tuned || base) after each token of a prompt: of one prompt at a time, as fp32 of a whole batch may not fit."""
        log_probs, theirs = (logits.float().cpu().log_softmax(-1) for logits in (base, tuned))
        parts = theirs.exp() * (theirs - log_probs)
        self.of_next = self.of_next + parts[real].double().sum(0)
        return parts.sum(-1)


_Run = tuple[Float[Tensor, "layer batch pos d_model"], Float[Tensor, "batch pos d_vocab"]]


def _run(
    model: Decoder, tokens: Tensor, mask: Bool[Tensor, "batch pos"], sites: Sequence[str], adapter: AdapterOrPath | None
) -> _Run:
    """The values at the sites in fp32 on the CPU, and the logits of the next token as the model gives them."""
    with under_adapter(model, adapter):
        inputs, attention = tokens.to(model.device), mask.long().to(model.device)
        logits, cache = model.run_with_cache(inputs, names_filter=list(sites), attention_mask=attention)
    return torch.stack([cache[site].float().cpu() for site in sites]), logits


def _check_alike(base: Decoder, tuned: Decoder) -> None:
    """Raises ValueError for models whose values cannot be subtracted."""
    for name in ("d_model", "d_vocab", "n_layers"):
        ours, theirs = getattr(base.cfg, name), getattr(tuned.cfg, name)
        if ours != theirs:
            raise ValueError(f"the models differ in {name}: the base has {ours}, the tuned one {theirs}")
    if set(base.cfg.processed) != set(tuned.cfg.processed):
        raise ValueError(
            f"the weights of the base were rewritten ({', '.join(base.cfg.processed) or 'not at all'}), and of the tuned model "
            f"({', '.join(tuned.cfg.processed) or 'not at all'}), so their streams differ by that: load both in the same way"
        )


def _same_inputs(
    base: Decoder, tuned: Decoder, prompts: Sequence[str] | Tensor, rows: range
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Token ids and the mask of real tokens; ValueError if the models read other ids in the same texts."""
    (tokens, mask), (others, _) = (inputs_of(model, prompts, rows) for model in (base, tuned))
    assert isinstance(tokens, Tensor)
    check_same_inputs(tokens, others)
    return tokens.cpu(), (torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask).cpu()


def _answers(
    model: Decoder, answers: Answers | None, wrong_answers: Answers | None
) -> tuple[list[int] | None, list[int] | None]:
    """The ids of the answers and of the wrong ones, each once."""
    if answers is None and wrong_answers is not None:
        raise ValueError("wrong_answers are what answers are compared with: give answers, too")
    found: list[list[int] | None] = []
    for name, given in (("answers", answers), ("wrong_answers", wrong_answers)):
        if isinstance(given, list | tuple | Tensor) and not len(given):
            raise ValueError(f"{name} is empty: give at least one, or None")
        ids = None if given is None else model.tokens.answer_ids(given, name).reshape(-1).tolist()
        found.append(None if ids is None else [*dict.fromkeys(map(int, ids))])
    return found[0], found[1]


def _result(
    tuned: Decoder,
    sums: _Sums,
    layers: Sequence[int],
    k: int,
    lens: Translator | None,
    answers: tuple[list[int] | None, list[int] | None],
    about: dict[str, Any],
    seed: int,
) -> ModelComparison:
    n_prompts, n = sum(of.shape[-1] for of in sums.sizes), sums.n_positions
    mean = (sums.total / n_prompts).float()
    axes = {"layer": list(layers), "position": list(range(n))}
    logits, (right, wrong) = _lens(tuned, mean, layers, lens), answers
    topic = None
    if right is not None:
        other = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed))
        of_other = _lens(tuned, other, layers, lens)
        shares = torch.stack([_outranked(each, right, wrong) for each in (logits, of_other)])
        words = spelled(tuned, torch.tensor(right))
        named: dict[str, Sequence[str | int]] = {
            "read": [DIFFERENCE, RANDOM],
            **axes,
            "answer": [words[token] for token in right],
        }
        topic = Scores(shares[..., None], named, about=about)
    top = logits.topk(k, -1).indices
    assert isinstance(sums.of_next, Tensor)
    tokens, kl, sizes = (torch.cat(parts) for parts in zip(*sums.of_tokens, strict=True))
    return ModelComparison(
        mean,
        Scores(torch.cat(sums.sizes, -1), axes, about=about),
        Scores(torch.cat(sums.kl, -1), {"position": [*map(str, range(n)), LATER]}, about=about),
        top,
        topic,
        of_next := (sums.of_next / len(tokens)).float(),
        tokens,
        kl,
        sizes,
        spelled(tuned, torch.cat([top.flatten(), tokens, of_next.topk(min(MOST_NEXT, len(of_next))).indices])),
    )


def _lens(
    model: Decoder,
    vectors: Float[Tensor, "layer position d_model"],
    layers: Sequence[int],
    lens: Translator | None,
) -> Float[Tensor, "layer position d_vocab"]:
    """The logits of differences by a lens, without those of no difference: what the lens and the final norm add to all."""
    rows = vectors.to(model.device, model.embed.W_E.dtype)
    both = [rows, torch.zeros_like(rows)]  # of one shape, so that equal models give zeros
    if lens is not None:
        both = [torch.stack([lens(row, layer) for row, layer in zip(of, layers, strict=True)]) for of in both]
    own, none = (decode(model, of.flatten(0, 1)) for of in both)
    return (own - none).cpu().unflatten(0, vectors.shape[:2])


def _outranked(
    logits: Float[Tensor, "layer position d_vocab"], right: Sequence[int], wrong: Sequence[int] | None
) -> Float[Tensor, "layer position answer"]:
    """The share of the wrong answers, or of all other tokens, that each answer outranks; equal logits count half."""
    others = [i for i in range(logits.shape[-1]) if i not in right] if wrong is None else list(wrong)
    own, theirs = logits[..., list(right)][..., None], logits[..., None, others]
    return ((own > theirs).double() + (own == theirs).double() / 2).mean(-1).float()
