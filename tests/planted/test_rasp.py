"""Programs of RASP, and the models that compute them: equal values at every token of every prompt."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm.planted import compile_program, programs
from hooked_lm.planted.compiler import CompiledProgram
from hooked_lm.planted.rasp import Average, Combine, Find, Map, Match, Operation, Position, Token, count

N = programs.N
COMPILED = {
    name: (program, compile_program(program, N))
    for name in ("reverse", "sort", "histogram", "brackets")
    if (program := getattr(programs, f"{name}_program")())
}


def said(compiled: CompiledProgram, letters: list[str]) -> list[str]:
    """What the model says at each letter."""
    ids = [0, *map(compiled.vocabulary.index, letters)]
    return [compiled.vocabulary[i] for i in compiled.model(torch.tensor([ids]))[0, 1:].argmax(-1)]


def computed(program: Operation, letters: list[str]) -> list[str]:
    return [str(value) for value in program.run(letters)]


LETTERS = st.lists(st.sampled_from(programs.LETTERS), min_size=1, max_size=N)


@given(LETTERS)
@settings(max_examples=30)
def test_reverse(letters: list[str]) -> None:
    program, compiled = COMPILED["reverse"]
    assert said(compiled, letters) == computed(program, letters) == letters[::-1]


@given(st.lists(st.sampled_from(programs.LETTERS), min_size=1, max_size=N, unique=True))
@settings(max_examples=30)
def test_sort(letters: list[str]) -> None:
    program, compiled = COMPILED["sort"]
    assert said(compiled, letters) == computed(program, letters) == sorted(letters)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=N))
@settings(max_examples=30)
def test_histogram(letters: list[str]) -> None:
    program, compiled = COMPILED["histogram"]
    assert said(compiled, letters) == computed(program, letters) == [str(Counter(letters)[each]) for each in letters]


@given(st.lists(st.sampled_from("()"), min_size=1, max_size=N))
@settings(max_examples=30)
def test_brackets(letters: list[str]) -> None:
    program, compiled = COMPILED["brackets"]
    expected = []
    for end in range(1, len(letters) + 1):
        rest = "".join(letters[:end])
        while "()" in rest:
            rest = rest.replace("()", "")
        expected.append("no" if rest else "yes")
    assert said(compiled, letters) == computed(program, letters) == expected


STEPS = st.tuples(st.sampled_from(["map", "combine", "count", "average", "find"]), *[st.integers(-1, 1)] * 3)


def built(steps: list[tuple[str, int, int, int]]) -> Operation:
    """A program of a few operations, each of which reads some of those before."""
    token, position = Token(("a", "b", "c")), Position(N)
    numbers: list[Operation] = [position, Map(lambda letter: ord(letter) - ord("a"), token)]
    for kind, one, other, shift in steps:
        first, second = numbers[one], numbers[other]
        if kind == "map":
            new: Operation = Map(lambda value, shift=shift: (value + shift) % 4, first)
        elif kind == "combine":
            new = Combine(lambda one, other, shift=shift: (one + 2 * other + shift) % 4, first, second)
        elif kind == "count":
            new = count(Match(first, second, lambda key, query, shift=shift: key >= query + shift), N)
        elif kind == "average":
            mean = Average(Match(first, second, lambda key, query, shift=shift: key + shift <= query), first, N)
            new = Map(lambda value: int(2 * value) % 4, mean)
        else:
            new = Find(Match(position, first, lambda key, query, shift=shift: key == query + shift), second)
        numbers.append(new)
    return Combine(lambda one, other: (one + other) % 5, numbers[-1], numbers[1])


@given(st.lists(STEPS, min_size=1, max_size=4), st.lists(st.sampled_from("abc"), min_size=1, max_size=N))
@settings(max_examples=25)
def test_random_programs_are_computed(steps: list[tuple[str, int, int, int]], letters: list[str]) -> None:
    program = built(steps)
    values, found = program.run(letters), said(compile_program(program, N), letters)
    both = [(name, str(value)) for name, value in zip(found, values, strict=True) if value is not None]
    assert [name for name, _ in both] == [value for _, value in both]


def test_only_what_depends_on_the_tokens_is_on_a_true_edge() -> None:
    """To reverse letters, three layers compute where to look, from positions alone."""
    _, compiled = COMPILED["reverse"]
    graph = compiled.truth.graph
    assert compiled.model.cfg.n_layers == 3
    assert [*graph.named(compiled.truth.edges)] == [("input", "L2H0<v>"), ("L2H0", "logits")]


def test_programs_that_no_model_computes_are_refused() -> None:
    token, position = Token(("a", "b")), Position(3)
    mean = Average(Match(position, position, lambda key, query: key <= query), position, 3)
    with pytest.raises(
        ValueError, match="a neuron for each pair of values, and this one is a number: use Map on it first"
    ):
        Combine(max, mean, position)
    with pytest.raises(ValueError, match="this key or query is a number: use Map on it first"):
        Match(mean, position, lambda key, query: True)
    for program in (mean, token, Map(str, position)):
        with pytest.raises(ValueError, match="a program ends with an operation of a head or an MLP that is no number"):
            compile_program(program, 3)
    with pytest.raises(TypeError, match="an average is of whole numbers and fractions, got 'a': use Map on it first"):
        Average(Match(position, position, lambda key, query: True), token, 3).run("ab")
    with pytest.raises(ValueError, match=r"Find copies from one position, and \[0, 1\] are selected"):
        Find(Match(token, token, lambda key, query: key == query), token).run("aa")
