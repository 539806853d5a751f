"""Programs that are compiled: reverse, sort, histogram and balanced brackets."""

from collections.abc import Callable
from itertools import product
from random import Random

from hooked_lm.planted.blueprint import START
from hooked_lm.planted.compiler import compile_program
from hooked_lm.planted.planted import Example, Planted, draw_pairs
from hooked_lm.planted.rasp import Average, Combine, Find, Map, Match, Operation, Position, Token, count

N = 6  # letters of a prompt
LETTERS = tuple("abcdefgh")
Letters = tuple[list[str], list[str]]  # of a clean and a corrupted prompt


def is_equal(key: object, query: object) -> bool:
    return key == query


def reverse_program() -> Operation:
    """The letters from the last to the first."""
    token, position = Token(LETTERS), Position(N)
    length = count(Match(position, position, lambda key, query: True), N)
    mirrored = Combine(lambda n, place: n - 1 - place, length, position)
    return Find(Match(position, mirrored, is_equal), token)


def sort_program() -> Operation:
    """The letters in the order of the alphabet, if each occurs once."""
    token, position = Token(LETTERS), Position(N)
    rank = count(Match(token, token, lambda key, query: key < query), N)
    return Find(Match(rank, position, is_equal), token)


def histogram_program() -> Operation:
    """How often each letter occurs."""
    token = Token(LETTERS[:3])
    return count(Match(token, token, is_equal), N)


def brackets_program() -> Operation:
    """Whether the brackets up to here are balanced: none is closed before it was opened, and as many are closed as opened."""
    token, position = Token(("(", ")")), Position(N)
    up_to_here = Match(position, position, lambda key, query: key <= query)
    depth = Average(up_to_here, Map(lambda bracket: 1 if bracket == "(" else -1, token), N)
    went_below = Average(up_to_here, Map(lambda mean: int(mean < 0), depth), N)
    is_right = Map(lambda mean: mean == 0, went_below)
    return Combine(lambda right, even: "yes" if right and even else "no", is_right, Map(lambda mean: mean == 0, depth))


def reverse(seed: int) -> Planted:
    """The first letter, at the last position."""

    def example(rng: Random) -> Letters:
        right, wrong = rng.sample(LETTERS, 2)
        return [right, *rng.choices(LETTERS, k=N - 1)], [wrong, *rng.choices(LETTERS, k=N - 1)]

    return _compiled(
        "reverse",
        "Says the letters in reverse order: three layers compute where to look, from positions alone, and L2H0 looks there.",
        reverse_program(),
        example,
        seed,
    )


def sort(seed: int) -> Planted:
    """The last letter in the order of the alphabet, at the last position."""

    def example(rng: Random) -> Letters:
        *letters, new = rng.sample(LETTERS, N + 1)
        changed = [new if letter == max(letters) else letter for letter in letters]
        return (letters, changed) if rng.random() < 0.5 else (changed, letters)

    return _compiled(
        "sort",
        "Sorts letters: L0H0 and m0 count how many are smaller, and L1H0 finds the letter of which that is the position.",
        sort_program(),
        example,
        seed,
    )


def histogram(seed: int) -> Planted:
    """How often the last letter occurs."""

    def example(rng: Random) -> Letters:
        clean = rng.choices(LETTERS[:3], k=N)
        corrupted = list(clean)
        place = rng.choice([N - 1, rng.randrange(N - 1)])
        corrupted[place] = rng.choice([letter for letter in LETTERS[:3] if letter != clean[place]])
        return clean, corrupted

    return _compiled(
        "histogram",
        "Says how often each letter occurs: L0H0 attends to all that are equal and to the start token, whose share m0 reads.",
        histogram_program(),
        example,
        seed,
    )


def brackets(seed: int) -> Planted:
    """Whether brackets are balanced."""

    program = brackets_program()
    prompts: dict[bool, list[list[str]]] = {True: [], False: []}
    for letters in product("()", repeat=N):
        conditions = [condition.run(letters)[-1] for condition in program.inputs]
        if any(conditions):  # where both fail, restoring one changes nothing
            prompts[all(conditions)].append(list(letters))

    def example(rng: Random) -> Letters:
        both = rng.choice(prompts[True]), rng.choice(prompts[False])
        return both if rng.random() < 0.5 else both[::-1]

    return _compiled(
        "brackets",
        "Says whether brackets are balanced: L1H0 averages 1 for ( and -1 for ), m1 says where the mean is below 0 and whether "
        "it is 0 at the end, L2H0 and m2 whether it was ever below, and m3 combines both.",
        program,
        example,
        seed,
        "causal",
    )


def _compiled(
    name: str,
    description: str,
    program: Operation,
    letters: Callable[[Random], Letters],
    seed: int,
    attention_dir: str = "bidirectional",
) -> Planted:
    """The model of a program, and prompts whose values at the last letter differ."""
    found = compile_program(program, N, seed, attention_dir)

    def example(rng: Random) -> Example:
        while True:
            both = letters(rng)
            right, wrong = (str(program.run(some)[-1]) for some in both)
            if right != wrong:
                return [START, *both[0]], [START, *both[1]], right, wrong

    pairs, held_out = draw_pairs(example, found.vocabulary, seed)
    return Planted(
        name=name,
        description=description,
        model=found.model,
        vocabulary=found.vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=found.truth,
    )
