"""Evaluates dictionaries: explained variance, sparsity, and the model's loss with reconstructions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.hook import Coder, Dictionary, Transcode, decoded, encoded
from hooked_lm.interventions.dictionaries.site import site_read, warn_if_elsewhere
from hooked_lm.interventions.dictionaries.stream import Activations, Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import Scores, provenance

ABLATIONS = ("mean", "zero")


def evaluate_dictionary(
    model: HookedRootModule,
    prompts: Prompts,
    sae: Coder,
    *,
    site: Site | None = None,
    site_out: Site | None = None,
    skip: int = 0,
    batch_size: int = 32,
) -> Scores:
    """The metrics of a dictionary on texts, along the axis `figure`.

    "explained variance": one minus the squared error of reconstructions over the variance of the vectors; 1 is perfect, 0 no
    better than the mean vector, and it can be negative. "L0": the average number of active features of a vector; few are good at
    the same explained variance. "dead": the fraction of features that are never active, at best 0; rare features look dead on few
    texts. For language models also the next-token cross entropy in nats: "CE" of the unchanged model; "CE spliced" with the site
    replaced by reconstructions, without the error, at best "CE"; "CE mean-ablated", "CE zero-ablated" with the mean vector or
    zeros, far above "CE" if the site matters; and the fraction of that difference which reconstructions recover, "CE recovered
    (mean)", "CE recovered (zero)": at best 1, 0 is as bad as the ablation. In the residual stream it is close to 1 for almost any
    dictionary, because its ablation does so much harm.

    Args:
        prompts, skip: as for `train_dictionary`; skipped positions are unchanged in the spliced forward passes.
        batch_size: how many prompts run together.
        site, site_out: by default those in the dictionary's config.

    Raises ValueError if the site is not known, or the widths differ.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.dictionaries import TopK
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> sae = (
    ...     TopK.Config(d_in=128, d_sae=256, k=8, hook_point="blocks.1.hook_mlp_out")
    ...     .build()
    ...     .eval()
    ... )
    >>> sae = sae.to(model.device)
    >>> evaluate_dictionary(model, ["The capital of France is Paris."], sae).select(
    ...     figure="L0"
    ... ).mean
    tensor(8.)
    """
    cfg = getattr(sae, "cfg", None)
    site = site_read(sae, site)
    site_out = site_out if site_out is not None else getattr(cfg, "hook_point_out", None)
    stream = Activations(model, prompts, site, site_out, batch_size=batch_size, skip=skip)
    warn_if_elsewhere(sae, *stream.sites)
    n_prompts = len(stream.prompts)
    rows = [range(start, min(start + batch_size, n_prompts)) for start in range(0, n_prompts, batch_size)]
    with torch.no_grad():
        figures, mean = _of_vectors(stream, sae, rows)
        if isinstance(model, Decoder):
            figures |= _of_runs(model, stream, sae, rows, mean)
    about = provenance(model, sites=stream.sites, prompts=n_prompts, skip=skip)
    return Scores(torch.tensor(list(figures.values()))[:, None], {"figure": list(figures)}, about=about)


def warn_if_poor(figures: Scores, steps: int, width: int) -> None:
    """Warns of a dictionary that explains less than half of the variance, or of whose features half are never active."""
    explained, dead = (figures.select(figure=name).mean.item() for name in ("explained variance", "dead"))
    found = [f"explains {explained:.2f} of the variance of the held-out texts"] if explained < 0.5 else []
    found += [f"has {dead:.0%} features that are never active there"] if dead > 0.5 else []
    if found:
        warn_caller(
            f"the dictionary {' and '.join(found)}, so its features may mean nothing: train longer (steps, now {steps:,}), on "
            f"more texts, or with fewer features (width, now {width:,})"
        )


def _of_vectors(
    stream: Activations, sae: Coder, rows: Sequence[range]
) -> tuple[dict[str, float], Float[Tensor, " d_out"]]:
    """The metrics that need no spliced forward passes, and the mean of the output vectors."""
    n, n_active, error, total = 0, 0.0, 0.0, 0.0
    ever: Tensor | None = None
    first: Tensor | None = None  # sums are over deviations from the first vector, so that large means cost no precision
    shift: Tensor | None = None
    for some in rows:
        read, written = stream.vectors(some)
        if not len(read):
            continue
        features = encoded(sae, read)
        made = decoded(sae, features, read)
        if made.shape != written.shape:
            raise ValueError(
                f"the dictionary decodes vectors {list(made.shape)}, and those of the site are {list(written.shape)}"
            )
        first = written[0].double() if first is None else first
        moved = written.double() - first
        shift = moved.sum(0) if shift is None else shift + moved.sum(0)
        total += moved.pow(2).sum().item()
        error += (made.double() - written.double()).pow(2).sum().item()
        active = features != 0
        n, n_active = n + len(read), n_active + active.sum().item()
        ever = active.any(0) if ever is None else ever | active.any(0)
    if first is None or shift is None or ever is None:
        raise ValueError(f"no prompt has a position that counts, with skip={stream.skip}")
    variance = total - (shift.pow(2).sum() / n).item()
    explained = 1 - error / variance if variance > 0 else float("nan")
    mean = (first + shift / n).float()
    return {"explained variance": explained, "L0": n_active / n, "dead": 1 - ever.float().mean().item()}, mean


def _of_runs(model: Decoder, stream: Activations, sae: Coder, rows: Sequence[range], mean: Tensor) -> dict[str, float]:
    """The cross entropies of the model, unchanged and with the site replaced."""
    target = stream.sites[-1]
    if len(stream.sites) == 2:
        splice: Dictionary = Transcode(stream.sites, sae=sae, error="drop")
    else:
        splice = Dictionary(target, sae=sae, error="drop")

    def kept(hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that does not change the skipped positions."""

        def change(value: Tensor, hook_point: HookPoint) -> Tensor | None:
            new = hook(value, hook_point)
            return (
                new
                if new is None or not stream.skip
                else torch.cat([value[:, : stream.skip], new[:, stream.skip :]], 1)
            )

        return change

    def constant(vector: Tensor) -> Callable[..., Any]:
        return lambda value, hook: vector.to(value).expand(*value.shape[:2], -1).reshape(value.shape).clone()

    runs: dict[str, list[tuple[str, Callable[..., Any]]]] = {
        "CE": [],
        "CE spliced": [(site, kept(splice)) for site in stream.sites],
        "CE mean-ablated": [(target, kept(constant(mean)))],
        "CE zero-ablated": [(target, kept(constant(torch.zeros_like(mean))))],
    }
    found = {name: _cross_entropy(model, stream, rows, hooks) for name, hooks in runs.items()}
    for ablation in ABLATIONS:
        lost = found[f"CE {ablation}-ablated"]
        range_ = lost - found["CE"]
        found[f"CE recovered ({ablation})"] = (lost - found["CE spliced"]) / range_ if range_ else float("nan")
    return found


def _cross_entropy(
    model: Decoder, stream: Activations, rows: Sequence[range], hooks: Sequence[tuple[str, Any]]
) -> float:
    """The mean cross entropy of next tokens, in nats."""
    total, n = 0.0, 0
    for some in rows:
        tokens, mask = stream.inputs(some)
        assert mask is not None
        options: dict[str, Any] = {"return_type": "loss", "loss_per_token": True, "attention_mask": mask.long()}
        losses = model.run_with_hooks(tokens, fwd_hooks=list(hooks), **options)
        counts = mask[:, 1:] & mask[:, :-1]
        total += losses[counts].double().sum().item()
        n += int(counts.sum())
    return total / n if n else float("nan")
