"""From programs to models whose circuits are the programs (Lindner et al. 2023, arXiv:2301.05062, tell how).

Each operation has a subspace of the residual stream. It is computed in the first sublayer after those of its inputs that can: a
head of attention, or some neurons of an MLP. The true edges are what the program reads: from where the value of an operation is
written to where it is read, if it depends on the tokens at all.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.planted.blueprint import IS_START, POSITION, START, TOKEN, Blueprint
from hooked_lm.planted.rasp import Gather, Operation, Pointwise, Position, Token
from hooked_lm.pretrained import HookedTransformer

OFF = -1e4  # what the start token adds to neurons that read a number: it has none
N_BYSTANDERS = 4  # further neurons of a layer, beside one further head


@dataclass(frozen=True)
class CompiledProgram:
    """A model that computes a program: the names of its tokens, and the edges that carry what depends on the tokens."""

    model: HookedTransformer
    vocabulary: tuple[str, ...]
    truth: Circuit


def compile_program(program: Operation, n: int, seed: int = 0, attention_dir: str = "bidirectional") -> CompiledProgram:
    """Write the weights of a model that computes a program.

    A prompt is the start token "^" and at most `n` letters; at each letter the model says the value of the program there.

    Args:
        program: the last operation, which is no number. Its values are tokens, by their `str`.
        n: the largest number of letters.
        seed: of the heads and neurons that have no part in the program.
        attention_dir: "bidirectional", or "causal" for a program whose heads look back only.

    Raises ValueError for a program that is a number, has no tokens or not one alphabet, and is not computed by a head or an MLP.

    >>> import torch
    >>> from hooked_lm.planted import rasp
    >>> token, position = rasp.Token(("a", "b", "c")), rasp.Position(4)
    >>> before = rasp.Match(position, position, lambda key, query: key == query - 1)
    >>> compiled = compile_program(rasp.Map(str.upper, rasp.Find(before, token)), 4)
    >>> ids = [compiled.vocabulary.index(name) for name in "^bacc"]
    >>> [
    ...     compiled.vocabulary[i]
    ...     for i in compiled.model(torch.tensor([ids]))[0, 2:].argmax(-1)
    ... ]
    ['B', 'A', 'C']
    >>> list(compiled.truth.graph.named(compiled.truth.edges))
    [('input', 'L0H0<v>'), ('L0H0', 'm0'), ('m0', 'logits')]
    """
    plan = _Plan.of(program)
    letters = plan.letters
    vocabulary = (START, *letters, *(name for name in map(str, program.domain) if name not in letters))
    neurons = {each: each.neurons() for each in plan.places if isinstance(each, Pointwise)}
    widths = Counter[int]()
    for pointwise, (_, _, biases) in neurons.items():
        widths[plan.layer(pointwise)] += len(biases)
    draft = Blueprint(
        vocabulary,
        {plan.names[operation]: operation.size for operation in plan.written},
        n_ctx=n + 1,
        n_layers=max(map(plan.layer, plan.written)) + 1,
        n_heads=max([0, *(head for _, head in plan.heads.values())]) + 2,
        d_mlp=max([0, *widths.values()]) + N_BYSTANDERS,
        attention_dir=attention_dir,
    )
    first, at = draft.places[TOKEN].start + 1, draft.places[POSITION].start + 1
    draft.places[Token.__name__], draft.places[Position.__name__] = (
        slice(first, first + len(letters)),
        slice(at, at + n),
    )
    for operation in plan.written:
        if isinstance(operation, Gather):
            draft.head(
                plan.heads[operation],
                query=plan.names[operation.match.queries],
                key=plan.names[operation.match.keys],
                value=IS_START if operation.copied is None else plan.names[operation.copied],
                output=plan.names[operation],
                relation=operation.match.relation(),
                mapping=operation.mapping(),
                rest=operation.rest,
            )
        elif isinstance(operation, Pointwise):
            reads, writes, biases = neurons[operation]
            inputs: dict[str, Tensor] = {}
            for each, weight in zip(operation.inputs, reads, strict=True):  # twice the same, perhaps
                inputs[plan.names[each]] = inputs.get(plan.names[each], 0) + weight
            if operation.inputs[0].is_number:
                inputs[IS_START] = torch.full((1, len(biases)), OFF)
            draft.neurons(plan.layer(operation), inputs, {plan.names[operation]: writes}, biases)
    says = torch.zeros(program.size, len(vocabulary))
    for row, value in zip(says, program.domain, strict=True):
        row[vocabulary.index(str(value))] = 1
    draft.logits({plan.names[program]: says})
    draft.bystanders(seed)
    model = draft.model()
    return CompiledProgram(model, vocabulary, Circuit.of(Graph.of(model), plan.edges(program), method="compiled"))


@dataclass(frozen=True)
class _Plan:
    """Where each operation of a program is computed: 0 in the input, 2 l + 1 in the attention of layer l, 2 l + 2 in its MLP."""

    places: dict[Operation, int]
    heads: dict[Operation, tuple[int, int]]
    names: dict[Operation, str]
    letters: tuple[str, ...]

    @classmethod
    def of(cls, program: Operation) -> "_Plan":
        places: dict[Operation, int] = {}
        _place(program, places)
        alphabets = {operation.letters for operation in places if isinstance(operation, Token)}
        if program.is_number or not isinstance(program, Gather | Pointwise) or len(alphabets) != 1:
            raise ValueError(
                "a program ends with an operation of a head or an MLP that is no number, and reads the tokens of one alphabet; "
                f"got {type(program).__name__} and {len(alphabets)} alphabets"
            )
        for operation in places:
            if not isinstance(operation, Token | Position | Gather | Pointwise):
                raise TypeError(
                    f"no head or MLP computes {type(operation).__name__}: use the operations of planted.rasp"
                )
        heads, used = dict[Operation, tuple[int, int]](), Counter[int]()
        for operation, place in places.items():
            if isinstance(operation, Gather):
                heads[operation] = place // 2, used[place]
                used[place] += 1
        names = {
            operation: f"{i} {type(operation).__name__}" if place else type(operation).__name__
            for i, (operation, place) in enumerate(places.items())
        }
        return cls(places, heads, names, alphabets.pop())

    @property
    def written(self) -> list[Operation]:
        """The operations that the model computes."""
        return [operation for operation, place in self.places.items() if place]

    def layer(self, operation: Operation) -> int:
        return (self.places[operation] - 1) // 2

    def node(self, operation: Operation) -> str:
        """The writer of an operation, which is also the name of an MLP as a reader."""
        if operation in self.heads:
            return "L{}H{}".format(*self.heads[operation])
        return f"m{self.layer(operation)}" if self.places[operation] else "input"

    def edges(self, program: Operation) -> list[tuple[str, str]]:
        """What is read from where, of values that depend on the tokens."""
        reads = [(program, "logits")]
        for operation in self.written:
            ports = ("<q>", "<k>", "<v>") if isinstance(operation, Gather) else ("", "")
            reads += [(each, self.node(operation) + port) for each, port in zip(operation.inputs, ports, strict=False)]
        return [(self.node(read), reader) for read, reader in reads if read.varies()]


def _place(operation: Operation, places: dict[Operation, int]) -> int:
    """The sublayer of an operation, after those of its inputs."""
    if operation not in places:
        after = max((_place(each, places) for each in operation.inputs), default=-1)
        parity = isinstance(operation, Gather)
        places[operation] = 0 if after < 0 else after + 1 + ((after + 1) % 2 != parity)
    return places[operation]
