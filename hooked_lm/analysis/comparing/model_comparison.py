"""The result of `compare_models`: where two models differ, and what their difference says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.verbalize import Verbalization, verbalize
from hooked_lm.engine.prompts import Prompts
from hooked_lm.extras import lazy_import
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import Label, stored
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.scores import Scores
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.ModelComparison"
MOST_NEXT = 50  # next tokens whose words are kept
LATER = "later"  # the positions after the first ones, together


@dataclass(frozen=True, eq=False, repr=False)
class ModelComparison(Tabular):
    """How a tuned model differs from its base on prompts; computed by `compare_models`.

    Args:
        differences: the mean over prompts of tuned minus base, at the first positions, [layer, position, d_model].
        sizes: the norm of each prompt's difference over that of the base's value, with the axes layer and position.
        kl: KL(tuned || base) of the next token, in nats, by position: the first ones, and the mean of all later ones.
        lens_tokens: ids of the tokens that the lens gives the mean difference, the most likely first, [layer, position, rank].
        topic: of the answers that were given, the share of the other tokens, or of the wrong answers, that each outranks in the
            lens: 1 is the best, 0.5 chance. Axes: "read" ("difference", and "random direction" as a control), layer, position,
            answer. It is of the mean difference, so it has no interval over prompts. None without answers.
        kl_of_next: the part of the mean KL over all tokens that is due to each next token, [d_vocab]; they sum to it. It is large
            for what the tuned model predicts and the base does not.
        token_ids, token_kl, token_sizes: of every token of the prompts, its id, the KL after it, and the size of the
            difference there in each layer, [token], [token] and [token, layer].
        words: the strings of ids.
    """

    differences: Float[Tensor, "layer position d_model"]
    sizes: Scores
    kl: Scores
    lens_tokens: Int[Tensor, "layer position rank"]
    topic: Scores | None
    kl_of_next: Float[Tensor, " d_vocab"]
    token_ids: Int[Tensor, " token"]
    token_kl: Float[Tensor, " token"]
    token_sizes: Float[Tensor, "token layer"]
    words: Mapping[int, str]

    @property
    def axes(self) -> Mapping[str, Sequence[Label]]:
        """The layers and the first positions."""
        return self.sizes.axes

    @property
    def about(self) -> Mapping[str, Any]:
        """The models, versions and settings."""
        return self.sizes.about

    def vector(self, layer: int, positions: int) -> Float[Tensor, " d_model"]:
        """The mean difference at a layer and one of the first positions."""
        layers, n_positions = list(self.axes["layer"]), len(self.axes["position"])
        if layer not in layers or not 0 <= positions < n_positions:
            raise IndexError(
                f"there is a difference at the layers {layers} and the positions 0 to {n_positions - 1}, got {layer} and "
                f"{positions}"
            )
        return self.differences[layers.index(layer), positions]

    def verbalize(
        self, model: Decoder, prompt: Prompts, slot: str | int, *, layer: int, positions: int, **options: Any
    ) -> Verbalization:
        """What a model says with the mean difference in the slot of a prompt; see `analysis.verbalize` for the arguments.

        `layer` and `positions` are those of the difference; `at_layer=` is the layer that it is put at.
        """
        at_layer = options.pop("at_layer", None)
        return verbalize(model, self.vector(layer, positions), prompt, slot, layer=at_layer, **options)

    def by_token(self, least: int = 1) -> "pd.DataFrame":
        """A row for each token of the prompts: how often it occurs (`count`), the mean `kl` of what follows it, and the mean
        `size` of the difference at its last layer. Tokens that occur less often than `least` are left out."""
        table = pd.DataFrame(
            {
                "token": [self.words[token] for token in self.token_ids.tolist()],
                "kl": self.token_kl.numpy(),
                "size": self.token_sizes[:, -1].numpy(),
            }
        )
        grouped = (
            table.groupby("token").agg(count=("kl", "size"), kl=("kl", "mean"), size=("size", "mean")).reset_index()
        )
        return grouped[grouped["count"] >= least].sort_values("kl", ascending=False, ignore_index=True)

    def by_next_token(self, n: int = 10) -> "pd.DataFrame":
        """The `n` next tokens with the largest parts of the mean KL: `token`, `kl` in nats, and `share` of the whole."""
        top = self.kl_of_next.topk(min(n, MOST_NEXT, len(self.kl_of_next)))
        whole = self.kl_of_next.sum().item() or 1.0
        words = [self.words[token] for token in top.indices.tolist()]
        return pd.DataFrame({"token": words, "kl": top.values.numpy(), "share": (top.values / whole).numpy()})

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each layer and first position: the `size` of the difference, what the `lens` reads in its mean, the `kl` of
        the next token there, and with answers the mean share of the `topic` and that of the `random` direction."""
        rows = []
        for (i, layer), (j, position) in product(*map(enumerate, self.axes.values())):
            row = {
                "layer": layer,
                "position": position,
                "size": self.sizes.mean[i, j].item(),
                "kl": self.kl.mean[j].item(),
                "lens": [self.words[token] for token in self.lens_tokens[i, j].tolist()],
            }
            if self.topic is not None:
                own, other = self.topic.mean[:, i, j].mean(-1).tolist()
                row |= {"topic": own, "random": other}
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self, title: str = "") -> "go.Figure":
        """The token that the lens reads in the mean difference, after each layer (the last at the top) at each of the first
        positions; colour shows the size of the difference. On hover a cell shows all tokens."""
        from hooked_lm.viz.token_views import token_grid

        tokens, words = self.lens_tokens.flip(0).tolist(), self.words
        return token_grid(
            self.sizes.mean.flip(0),
            [[words[cell[0]] for cell in row] for row in tokens],
            x_labels=self.axes["position"],
            y_labels=self.axes["layer"][::-1],
            title=title or f"What the difference of the models says, by the {self.about['lens']}",
            x_title="position",
            y_title="layer",
            value_name="size of the difference",
            details=[[[words[token] for token in cell] for cell in row] for row in tokens],
        )

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it."""
        scores = {"sizes": self.sizes, "kl": self.kl, **({} if self.topic is None else {"topic": self.topic})}
        names = ("differences", "lens_tokens", "kl_of_next", "token_ids", "token_kl", "token_sizes")
        tensors = {name: getattr(self, name) for name in names} | {name: of.values for name, of in scores.items()}
        axes = {name: list(of.axes.items()) for name, of in scores.items()}
        stored.write(path, FORMAT, tensors, {"axes": axes, "about": self.about, "words": list(self.words.items())})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "ModelComparison":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        axes = {name: dict(of) for name, of in header["axes"].items()}
        sizes, kl = (Scores(tensors.pop(name), axes[name], about=header["about"]) for name in ("sizes", "kl"))
        topic = None
        if "topic" in axes:
            topic = Scores(tensors.pop("topic"), axes["topic"], about=header["about"])
        known: dict[str, Any] = {**tensors, "sizes": sizes, "kl": kl, "topic": topic}
        return cls(**known, words=dict(header["words"]))

    def __repr__(self) -> str:
        with in_words() as skewed:
            low, high = self.kl.interval()
        span = f" [{low[-1]:.3g}, {high[-1]:.3g}]" if self.kl.n_prompts > 1 else ""
        place, said = self._largest()
        n = self.kl.n_prompts
        more = ", ".join(repr(self.words[token]) for token in self.kl_of_next.topk(3).indices.tolist())
        parts = [
            f"KL {self.kl.mean[-1]:.3g}{span} nats{''.join(f' ({word})' for word in skewed)}, most of it for {more}",
            f"at {place} the lens reads {said}",
        ]
        if self.topic is not None:
            own, other = self.topic.mean.flatten(1).mean(1).tolist()
            parts.append(f"the answers outrank {own:.0%} of the others, with a random direction {other:.0%}")
        if not self.differences.any():
            parts = ["no difference: the values and the predictions are the same"]
        return f"ModelComparison({n} prompt{'s' * (n != 1)}; {'; '.join(parts)})"

    def _largest(self) -> tuple[str, str]:
        """Where the difference is largest relative to the base, and what the lens reads there."""
        i, j = divmod(int(self.sizes.mean.argmax()), len(self.axes["position"]))
        said = ", ".join(repr(self.words[token]) for token in self.lens_tokens[i, j, :3].tolist())
        return f"layer {self.axes['layer'][i]}, position {self.axes['position'][j]}", said
