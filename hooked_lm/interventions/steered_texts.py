"""What a model writes under steering by several doses, and whether it repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, tensor

from hooked_lm.callers import warn_caller
from hooked_lm.engine.decoders import decoder
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookedRootModule
from hooked_lm.interventions.positions import Positions
from hooked_lm.interventions.steering import Layers, SteeringVectors
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import wilson
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.SteeredTexts"
SHARE = "share of repeated bigrams"  # the column and the axis of `repeated`
REPEATS = 0.2  # more repeated pairs of tokens than without steering, at which text is said to repeat itself


@dataclass(frozen=True, eq=False, repr=False)
class SteeredTexts(Tabular):
    """The continuations of prompts at each dose; computed by `steered_texts`.

    Args:
        doses: the doses, the first is 0: without steering.
        prompts: the prompts.
        texts: of each dose, the continuation of each prompt.
        repeated: the share of the pairs of neighbouring tokens of a continuation that occurred in it before, [dose, prompt].
    """

    doses: Sequence[float]
    prompts: Sequence[str]
    texts: Sequence[Sequence[str]]
    repeated: Float[Tensor, "dose prompt"]

    @property
    def repeating(self) -> list[float]:
        """The doses at which the texts repeat themselves more than without steering."""
        means = self.repeated.mean(1)
        return [dose for dose, mean in zip(self.doses, means.tolist(), strict=True) if mean > means[0].item() + REPEATS]

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each dose and prompt: `dose`, `prompt`, `text`, and `share of repeated bigrams`: of the pairs of neighbouring
        tokens of the text, how many occurred in it before; 0 is none, and near 1 the text goes in circles."""
        rows = [
            {"dose": dose, "prompt": prompt, "text": text, SHARE: share}
            for dose, texts, shares in zip(self.doses, self.texts, self.repeated.tolist(), strict=True)
            for prompt, text, share in zip(self.prompts, texts, shares, strict=True)
        ]
        return pd.DataFrame(rows)

    def plot(self, title: str = "") -> "go.Figure":
        """A line over doses: the share of repeated bigrams, pairs of neighbouring tokens, in the mean of the prompts, with its
        95% interval over several prompts (Wilson's)."""
        from hooked_lm import viz

        title = title or "How much steered text repeats itself"
        intervals = {SHARE: wilson(self.repeated)} if self.repeated.shape[1] > 1 else None
        means = {SHARE: self.repeated.mean(1)}
        return viz.lines(list(self.doses), means, intervals, title=title, x_title="dose", y_title=SHARE)

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        header = {
            "doses": list(self.doses),
            "prompts": list(self.prompts),
            "texts": [list(texts) for texts in self.texts],
        }
        stored.write(path, FORMAT, {"repeated": self.repeated}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "SteeredTexts":
        """Reads a file that `save` wrote; ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        return cls(header["doses"], header["prompts"], header["texts"], tensors["repeated"])

    def __repr__(self) -> str:
        found = ", ".join(f"{dose:g}" for dose in self.repeating)
        doses = ", ".join(f"{dose:g}" for dose in self.doses)
        n = len(self.prompts)
        return f"SteeredTexts({n} prompt{'s' * (n != 1)} at the doses {doses}; repeated text at {found or 'none'})"


def steered_texts(
    model: HookedRootModule,
    vectors: SteeringVectors,
    prompts: str | Sequence[str] | Chat,
    *,
    doses: Sequence[float | int] = (0.25, 0.5, 0.75, 1.0),
    layers: Layers | None = None,
    positions: Positions = "all",
    max_new_tokens: int = 20,
) -> SteeredTexts:
    """What a model writes after prompts under steering, for several doses, of which one is chosen.

    Args:
        prompts: texts or conversations; the most likely token is taken each time.
        doses: lengths of what is added, in norms of the values there; negative ones move in the opposite direction.
        layers, positions: as for `SteeringVectors.hooks`.

    Returns SteeredTexts, with the dose 0 first. Warns of doses at which text repeats itself. Raises TypeError for a model that is
    not a decoder, ValueError for no prompts or doses, and for vectors that do not know the norms at their site.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions import steering_vectors
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> women = ["Mary was ill, so", "Anna slept late because"]
    >>> men = ["Tom was ill, so", "Paul slept late because"]
    >>> vectors = steering_vectors(model, women, men)
    >>> found = steered_texts(
    ...     model, vectors, "Tom left early because", doses=[0.5], layers=2, max_new_tokens=3
    ... )
    >>> found.texts
    [[' he was late'], [' she was happy']]
    """
    model = decoder(model, "steered texts are those of")
    given: list[Any] = [prompts] if isinstance(prompts, str) else [prompts[i] for i in range(len(prompts))]
    texts = list(prompts.texts) if isinstance(prompts, Chat) else given
    if not texts or not len(doses):
        raise ValueError(f"give at least one prompt and one dose, got {len(texts)} and {len(doses)}")
    chosen = [vectors.best_layer()] if layers is None else vectors.chosen_layers(layers)
    written: list[list[str]] = []
    repeated: list[list[float]] = []
    for dose in (0.0, *doses):
        by = {layer: dose / vectors.dose(layer) for layer in chosen}
        with model.hooks(vectors.adding(by, positions)):
            ids = [_continued(model, prompt, max_new_tokens) for prompt in given]
        written.append([str(model.to_string(tensor(new))) if new else "" for new in ids])
        repeated.append([repeated_share(new) for new in ids])
    found = SteeredTexts([0.0, *map(float, doses)], texts, written, tensor(repeated))
    if found.repeating:
        shares = dict(zip(found.doses, found.repeated.mean(1).tolist(), strict=True))
        said = ", ".join(f"{dose:g} ({shares[dose]:.0%} of the bigrams)" for dose in found.repeating)
        warn_caller(f"text repeats itself at the doses {said}, without steering {shares[0.0]:.0%}: use smaller ones")
    return found


def _continued(model: Decoder, prompt: str | Chat, max_new_tokens: int) -> list[int]:
    tokens = prompt if isinstance(prompt, Chat) else model.to_tokens(prompt)
    ids = model.generate(tokens, max_new_tokens, do_sample=False, verbose=False, return_type="tokens")
    return ids[0, tokens.shape[1] :].tolist()


def repeated_share(ids: Sequence[int]) -> float:
    """The share of the pairs of neighbouring ids that occurred before; 0 for fewer than two pairs.

    >>> repeated_share([1, 2, 3, 4]), repeated_share([1, 2, 1, 2, 1])
    (0.0, 0.5)
    """
    pairs = [*pairwise(ids)]
    return 0.0 if len(pairs) < 2 else 1 - len(set(pairs)) / len(pairs)
