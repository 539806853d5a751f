"""Weights written by hand, as maps between named subspaces of the residual stream.

A subspace is a range of the stream's coordinates with a name. A head finds the positions whose key subspace matches its query
subspace, and copies one subspace of what it finds into another. A neuron reads some subspaces and writes some. The stream is
the sum of what all of them write, as there are no norms, so a model is as legible as the list of its maps.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.pretrained import HookedTransformer

START = "^"  # the first token of every prompt: heads that find nothing rest there
SHARP = 250.0  # a score at which attention is 0 or 1 exactly, and has no gradient
ONE, IS_START, POSITION, TOKEN, SCRATCH = "one", "start", "position", "token", "scratch"
N_SCRATCH = 6

Maps = Mapping[str, Float[Tensor, "_ _"]]  # subspace -> what is read from it, or what is written to it


@dataclass
class Blueprint:
    """A decoder without norms, whose weights are 0 until they are written.

    The stream of every model has the subspaces "token" (the token as a one-hot vector, 0 for the start token), "position"
    (likewise), "one" (1 everywhere), "start" (1 at the first token) and "scratch"; `subspaces` names the others with their sizes.

    Args:
        vocabulary: the names of the tokens; the first is the start token, "^".
        subspaces: the sizes of further subspaces by name.
        n_ctx, n_layers, n_heads, d_mlp, attention_dir: as for `HookedTransformerConfig`.

    >>> draft = Blueprint(["^", "a", "b"], {"previous": 3}, n_ctx=4, n_layers=1, n_heads=1)
    >>> draft.head(
    ...     (0, 0),
    ...     query="position",
    ...     key="position",
    ...     value="token",
    ...     output="previous",
    ...     relation=torch.ones(3).diag(-1),
    ... )
    >>> draft.logits({"previous": torch.eye(3)})
    >>> draft.model()(torch.tensor([[0, 1, 2, 2]])).argmax(-1)
    tensor([[0, 0, 1, 2]])
    """

    vocabulary: Sequence[str]
    subspaces: Mapping[str, int]
    n_ctx: int
    n_layers: int
    n_heads: int
    d_mlp: int = 8
    attention_dir: str = "causal"
    places: dict[str, slice] = field(init=False)
    network: HookedTransformer = field(init=False)
    weights: dict[str, Tensor] = field(init=False)
    written: dict[int, int] = field(init=False, default_factory=dict)  # layer -> how many neurons are in use
    heads: set[tuple[int, int]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        n_tokens, start = len(self.vocabulary), 0
        sizes = {ONE: 1, IS_START: 1, POSITION: self.n_ctx, TOKEN: n_tokens, SCRATCH: N_SCRATCH}
        self.places = {}
        for name, size in {**sizes, **self.subspaces}.items():
            self.places[name] = slice(start, start + size)
            start += size
        self.network = self._new()
        self.weights = {name: weight.zero_() for name, weight in self.network.named_parameters()}
        is_start = torch.arange(n_tokens) == 0
        self.weights["embed.W_E"][:, self.places[TOKEN]] = torch.diag((~is_start).float())
        self.weights["embed.W_E"][:, self.places[IS_START]] = is_start[:, None].float()
        self.weights["pos_embed.W_pos"][:, self.places[POSITION]] = torch.eye(self.n_ctx)
        self.weights["pos_embed.W_pos"][:, self.places[ONE]] = 1

    def _new(self) -> HookedTransformer:
        sizes = [place.stop - place.start for place in self.places.values()]
        cfg = HookedTransformerConfig(
            n_layers=self.n_layers,
            d_model=sum(sizes),
            n_heads=self.n_heads,
            d_head=max(sizes) + 1,
            d_mlp=self.d_mlp,
            n_ctx=self.n_ctx,
            d_vocab=len(self.vocabulary),
            act_fn="relu",
            normalization_type=None,
            use_attn_scale=False,
            attention_dir=self.attention_dir,
            device="cpu",
            seed=0,
        )
        return HookedTransformer(cfg).requires_grad_(False)

    def size(self, name: str) -> int:
        """The size of a subspace; raises KeyError for an unknown name."""
        place = self._place(name)
        return place.stop - place.start

    def _place(self, name: str) -> slice:
        if name not in self.places:
            raise KeyError(f"there is no subspace {name!r}; there are {', '.join(map(repr, self.places))}")
        return self.places[name]

    def head(
        self,
        place: tuple[int, int],
        *,
        query: str,
        key: str,
        value: str,
        output: str,
        relation: Float[Tensor, "query key"] | None = None,
        mapping: Float[Tensor, "value output"] | None = None,
        score: float = SHARP,
        rest: float = 0.5,
        rests_on: str | None = None,
    ) -> None:
        """Write the head at a place, (layer, head): it copies `value` from where `key` is related to the `query` to `output`.

        Args:
            query, key, value, output: names of subspaces.
            relation: [query, key], times `score` the attention score of each combination; None: 1 for equal ones.
            mapping: [value, output]; None: each coordinate to the same one.
            score: that of a related position; a large one makes attention 0 or 1.
            rest: the share of `score` that the start token has for every query, so that a head that finds nothing rests there.
            rests_on: a subspace; where it is not 0 at the query, the start token has as much more of `score`.

        Raises KeyError for an unknown subspace, and ValueError for a head that is written already.
        """
        layer, number = place
        if place in self.heads:
            raise ValueError(f"L{layer}H{number} is written already: choose another head")
        relation = torch.eye(self.size(query), self.size(key)) if relation is None else relation
        mapping = torch.eye(self.size(value), self.size(output)) if mapping is None else mapping
        n_keys = self.size(key)
        w_q, w_k, w_v, w_o = (self.weights[f"blocks.{layer}.attn.W_{letter}"][number] for letter in "QKVO")
        w_q[self._place(query), :n_keys] = score * relation
        w_k[self._place(key), :n_keys] = torch.eye(n_keys)
        w_q[self._place(ONE), n_keys] = rest * score
        w_k[self._place(IS_START), n_keys] = 1
        if rests_on is not None:
            w_q[self._place(rests_on), n_keys] = score
        w_v[self._place(value), : mapping.shape[1]] = mapping
        w_o[: mapping.shape[1], self._place(output)] = torch.eye(mapping.shape[1])
        self.heads.add(place)

    def neurons(self, layer: int, inputs: Maps, outputs: Maps, bias: float | Sequence[float] = 0.0) -> range:
        """Write ReLU neurons that read [subspace, neuron] and write [neuron, subspace]; returns their numbers.

        Raises ValueError if the MLP has no more neurons.
        """
        n = next(iter(inputs.values())).shape[1]
        first = self.written.get(layer, 0)
        if first + n > self.d_mlp:
            raise ValueError(f"layer {layer} has {self.d_mlp} neurons, and {first + n} are written: make d_mlp larger")
        w_in, w_out, b_in = (self.weights[f"blocks.{layer}.mlp.{name}"] for name in ("W_in", "W_out", "b_in"))
        for name, weight in inputs.items():
            w_in[self._place(name), first : first + n] = weight
        for name, weight in outputs.items():
            w_out[first : first + n, self._place(name)] = weight
        b_in[first : first + n] = torch.as_tensor(bias)
        self.written[layer] = first + n
        return range(first, first + n)

    def table(self, layer: int, source: str, target: str, mapping: Float[Tensor, "source target"]) -> range:
        """Write a neuron for each coordinate of a one-hot subspace that is mapped to something: it is on if the coordinate is."""
        used = mapping.any(1).nonzero()[:, 0]
        reads = 2 * torch.eye(len(mapping))[:, used]
        return self.neurons(layer, {source: reads}, {target: mapping[used]}, bias=-1.0)

    def logits(self, maps: Maps, bias: Mapping[str, float] | None = None) -> None:
        """Write the unembedding: [subspace, token], and the biases of some tokens by name."""
        for name, weight in maps.items():
            self.weights["unembed.W_U"][self._place(name)] = weight
        for token, number in (bias or {}).items():
            self.weights["unembed.b_U"][self.token(token)] = number

    def token(self, name: str) -> int:
        """The id of a token; raises KeyError for an unknown name."""
        if name not in self.vocabulary:
            raise KeyError(f"there is no token {name!r}; there are {', '.join(map(repr, self.vocabulary))}")
        return list(self.vocabulary).index(name)

    def one_hots(self, pairs: Iterable[tuple[str, str]]) -> Float[Tensor, "token token"]:
        """A map of tokens to tokens, from pairs of names."""
        found = torch.zeros(len(self.vocabulary), len(self.vocabulary))
        for source, target in pairs:
            found[self.token(source), self.token(target)] = 1
        return found

    def bystanders(self, seed: int) -> None:
        """Fill the heads and neurons that are not in use: they read everything, and write to "scratch", which only they read."""
        draw = torch.Generator().manual_seed(seed)

        def random(weight: Tensor) -> Tensor:
            return torch.randn(weight.shape, generator=draw) / len(weight) ** 0.5

        for layer in range(self.n_layers):
            for number in range(self.n_heads):
                if (layer, number) not in self.heads:
                    w_q, w_k, w_v, w_o = (self.weights[f"blocks.{layer}.attn.W_{letter}"][number] for letter in "QKVO")
                    for weight in (w_q, w_k, w_v):
                        weight.copy_(random(weight))
                    w_o[:, self.places[SCRATCH]] = random(w_o[:, self.places[SCRATCH]])
            first = self.written.get(layer, 0)
            w_in, w_out = (self.weights[f"blocks.{layer}.mlp.W_{name}"] for name in ("in", "out"))
            w_in[:, first:] = random(w_in[:, first:])
            w_out[first:, self.places[SCRATCH]] = random(w_out[first:, self.places[SCRATCH]])

    def model(self) -> HookedTransformer:
        """A model with the weights written so far."""
        return deepcopy(self.network)
