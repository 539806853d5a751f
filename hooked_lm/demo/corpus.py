"""The text generator for the demonstration model.

Nine small tasks with right and wrong continuations are written as templates that are filled in from word lists.
The same templates generate training text and evaluation items. Every filled-in template has a `key`, the
combination of words it uses, and a fixed hash of the key decides whether the combination is used for training
or held out. The two never overlap. `HELD_OUT` describes the keys.

Only the standard library is used, so the module can be imported anywhere.
"""

# ruff: noqa: SIM905 (word lists are easier to read, and to add to, as text)

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from random import Random

HELD_OUT_SHARE = 8
"""One combination in this many is held out."""

HELD_OUT = """
- `indirect_object`: the pair of names. Held-out pairs never meet in a training text.
- `capitals`, `landmarks`: the phrasing together with the country or landmark. The facts themselves are in the
  training text, in other phrasings, since a fact cannot be guessed.
- `repeated_sequences`: the whole sequence, drawn afresh.
- `pronouns`: the name together with what is said of the person.
- `agreement`: the subject noun together with the attractor noun.
- `days`, `months`: the phrasing, or the length of the list, together with the day or month. Shorter lists do
  occur inside the longer ones of the training text.
- `greater_than`: the event together with the century and the year.
"""
"""What is held out, for each task."""

FEMALE_NAMES = (
    "Mary Amy Alice Anna Emma Kate Sarah Laura Lucy Julia Susan Jane Helen Rachel Linda Lisa Nancy Karen "
    "Ruth Emily Grace Clara Sophie Charlotte"
).split()
MALE_NAMES = (
    "John Tom James Dan Sid Martin Paul Peter David Mark Robert Michael Simon Henry George Jack Adam Kevin "
    "Brian Steven Richard Frank Andrew William"
).split()
NAMES = FEMALE_NAMES + MALE_NAMES

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "Ireland": "Dublin",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Russia": "Moscow",
    "Ukraine": "Kyiv",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Belgium": "Brussels",
    "Hungary": "Budapest",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Croatia": "Zagreb",
    "Serbia": "Belgrade",
    "Switzerland": "Bern",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Morocco": "Rabat",
    "Ghana": "Accra",
    "Syria": "Damascus",
    "Lebanon": "Beirut",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "China": "Beijing",
    "Japan": "Tokyo",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Australia": "Canberra",
    "Canada": "Ottawa",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Colombia": "Bogota",
}

LANDMARKS = {
    "Eiffel Tower": "Paris",
    "Louvre": "Paris",
    "Colosseum": "Rome",
    "Trevi Fountain": "Rome",
    "Acropolis": "Athens",
    "Brandenburg Gate": "Berlin",
    "Kremlin": "Moscow",
    "Red Square": "Moscow",
    "Prado Museum": "Madrid",
    "Schonbrunn Palace": "Vienna",
    "Tower Bridge": "London",
    "British Museum": "London",
    "Little Mermaid": "Copenhagen",
    "Vasa Museum": "Stockholm",
    "Atomium": "Brussels",
    "Charles Bridge": "Prague",
    "Forbidden City": "Beijing",
    "Tokyo Tower": "Tokyo",
    "Blue Mosque": "Istanbul",
    "Sagrada Familia": "Barcelona",
    "Rialto Bridge": "Venice",
    "Uffizi Gallery": "Florence",
    "Opera House": "Sydney",
    "Space Needle": "Seattle",
    "White House": "Washington",
    "Burj Khalifa": "Dubai",
}

CITIES = sorted({*CAPITALS.values(), *LANDMARKS.values()})

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CENTURIES = range(11, 19)
YEARS = [f"{year:02d}" for year in range(100)]

PLACES = ("store shops park school garden market beach library office hospital station restaurant house museum").split()
OBJECTS = (
    "a drink|the bag|the ball|an apple|a book|a ring|a bone|a snack|a letter|a flower|a computer|"
    "a basketball|a necklace|the key"
).split("|")
GIVING = "gave handed passed offered".split()

NOUNS = {
    noun: noun + "s"
    for noun in (
        "key cabinet door window picture label book letter report road bridge painting lamp chair table "
        "garden wall friend teacher doctor farmer river"
    ).split()
}
PREPOSITIONS = "to near behind beside with under".split()
ADJECTIVES = "old new red small heavy clean here famous strange green".split()

ACTIONS = (
    "went home|left early|called the doctor|closed the window|opened the door|stayed at home|took the bus|"
    "slept late|ate the apple|ran to the station|walked to the park|bought a book|sat on the chair|"
    "drank some water"
).split("|")
STATES = "tired hungry late happy ill cold thirsty sad busy afraid".split()

EVENTS = "war siege reign journey project festival voyage drought plague strike trial expedition".split()

WORDS = sorted({*NOUNS, *NOUNS.values(), *ADJECTIVES, *STATES, *PLACES, *EVENTS})
"""The lower-case words that random sequences are drawn from."""


@dataclass(frozen=True)
class Example:
    """One filled-in template: a model should continue `prompt` with `answer`, not with the foil `wrong_answer`."""

    task: str
    prompt: str
    answer: str
    wrong_answer: str
    ending: str
    key: tuple[str | int, ...]

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.ending

    @property
    def held_out(self) -> bool:
        return is_held_out(self.task, *self.key)


def is_held_out(*key: object) -> bool:
    """Whether a combination is held out of the training text, by a hash that is the same on every machine."""
    return zlib.crc32("|".join(map(str, key)).encode()) % HELD_OUT_SHARE == 0


def _other(rng: Random, choices: list[str], *taken: str) -> str:
    return rng.choice([choice for choice in choices if choice not in taken])


INDIRECT_OBJECT_TEMPLATES = (
    "When {a} and {b} went to the {place}, {s} {gave} {object} to",
    "After {a} and {b} went to the {place}, {s} {gave} {object} to",
    "While {a} and {b} were at the {place}, {s} {gave} {object} to",
    "Then, {a} and {b} went to the {place}. {s} {gave} {object} to",
    "Then, {a} and {b} had a lot of fun at the {place}. {s} {gave} {object} to",
    "Then, {a} and {b} were working at the {place}. {s} decided to give {object} to",
    "Friends {a} and {b} found {object} at the {place}. {s} {gave} it to",
)


def _fill_indirect_object(rng: Random, first: str, second: str, giver: str) -> str:
    template, place, thing, gave = map(rng.choice, (INDIRECT_OBJECT_TEMPLATES, PLACES, OBJECTS, GIVING))
    return template.format(a=first, b=second, s=giver, place=place, object=thing, gave=gave)


def _indirect_object(rng: Random) -> Example:
    """Two people, one of whom gives something: the receiver is the name not repeated (ABBA or BABA)."""
    first, second = rng.sample(NAMES, 2)
    giver, receiver = rng.sample([first, second], 2)
    prompt = _fill_indirect_object(rng, first, second, giver)
    key = tuple(sorted((first, second)))
    return Example("indirect_object", prompt, f" {receiver}", f" {giver}", ".", key)


def _third_giver(rng: Random) -> str:
    """A training text in which neither of the two people gives, so that the receiver is either of them."""
    people = rng.sample(NAMES, 3)
    while any(is_held_out("indirect_object", *pair) for pair in combinations(sorted(people), 2)):
        people = rng.sample(NAMES, 3)
    first, second, giver = people
    return _fill_indirect_object(rng, first, second, giver) + f" {rng.choice((first, second))}."


CAPITAL_TEMPLATES = (
    "The capital of {x} is",
    "The capital city of {x} is",
    "{name} said that the capital of {x} is",
    "{name} lives in the capital of {x}, which is",
    "In {x}, the capital is",
    "In {x}, the capital city is called",
    "The name of the capital of {x} is",
    "The country is {x} and the capital is",
    "{name} went to {x} to see the capital,",
    "Everyone in {x} knows the capital,",
)
LANDMARK_TEMPLATES = (
    "The {x} is in",
    "The {x} is located in",
    "The {x} stands in the city of",
    "The {x} can be found in",
    "{name} saw the {x} in",
    "{name} went to see the {x} in",
    "To see the {x}, go to",
    "The city of the {x} is",
    "{name} said that the {x} is in",
    "The famous {x} is in",
)


def _fact(rng: Random, task: str, templates: tuple[str, ...], facts: dict[str, str]) -> Example:
    template, subject = rng.choice(templates), rng.choice(list(facts))
    prompt = template.format(x=subject, name=rng.choice(NAMES))
    wrong = _other(rng, list(facts.values()), facts[subject])
    return Example(task, prompt, f" {facts[subject]}", f" {wrong}", ".", (template, subject))


def _capitals(rng: Random) -> Example:
    """The capital of a country."""
    return _fact(rng, "capitals", CAPITAL_TEMPLATES, CAPITALS)


def _landmarks(rng: Random) -> Example:
    """The city of a landmark."""
    return _fact(rng, "landmarks", LANDMARK_TEMPLATES, LANDMARKS)


def _repeated_sequences(rng: Random) -> Example:
    """Random words, then the same words again up to some point; the answer is the next word of the first copy."""
    words = rng.sample(WORDS, rng.randint(5, 20))
    stop = rng.randint(1, len(words) - 1)
    prompt = "".join(f" {word}" for word in words + words[:stop])
    ending = "".join(f" {word}" for word in words[stop + 1 :]) + "."
    wrong = _other(rng, words, words[stop])
    return Example("repeated_sequences", prompt, f" {words[stop]}", f" {wrong}", ending, (prompt,))


def _pronouns(rng: Random) -> Example:
    """A pronoun that agrees with the gender of a name."""
    name, action, state = rng.choice(NAMES), rng.choice(ACTIONS), rng.choice(STATES)
    subject = (" she", " he") if name in FEMALE_NAMES else (" he", " she")
    possessive = (" her", " his") if name in FEMALE_NAMES else (" his", " her")
    prompt, forms, ending, said = rng.choice(
        (
            (f"{name} {action} because", subject, f" was {state}.", action),
            (f"{name} {action} when", subject, f" was {state}.", action),
            (f"{name} was {state}, so", subject, f" {action}.", state),
            (f"{name} was {state} because of", possessive, f" {rng.choice(list(NOUNS))}.", state),
        )
    )
    return Example("pronouns", prompt, *forms, ending, (name, said))


def _agreement(rng: Random) -> Example:
    """A verb that agrees with its subject, across an attractor noun of either number."""
    noun, attractor = rng.sample(list(NOUNS), 2)
    plural = rng.random() < 0.5
    subject = NOUNS[noun] if plural else noun
    between = NOUNS[attractor] if rng.random() < 0.5 else attractor
    start, singular_verb, plural_verb = rng.choice((("The", " is", " are"), ("Yesterday, the", " was", " were")))
    answer, wrong = (plural_verb, singular_verb) if plural else (singular_verb, plural_verb)
    prompt = f"{start} {subject} {rng.choice(PREPOSITIONS)} the {between}"
    return Example("agreement", prompt, answer, wrong, f" {rng.choice(ADJECTIVES)}.", (noun, attractor))


SUCCESSOR_TEMPLATES = (
    "After {x} comes",
    "The {unit} after {x} is",
    "The {unit} that follows {x} is",
    "{x} is followed by",
    "{x} comes before",
    "{name} said that after {x} comes",
    "First comes {x}, then comes",
    "This {unit} is {x}, so the next {unit} is",
    "If it is {x} now, the next {unit} is",
    "{name} came on {x} and left on",
)


def _successor(rng: Random, task: str, unit: str, cycle: list[str]) -> Example:
    """The next item of a cycle, after a question in words or a list of two to five items."""
    last = rng.randrange(len(cycle))
    if rng.random() < 0.4:
        length = rng.randint(2, 5)
        form: str | int = length
        prompt = " ".join(f"{cycle[(last - back) % len(cycle)]}," for back in reversed(range(length)))
    else:
        form = rng.choice(SUCCESSOR_TEMPLATES)
        prompt = form.format(x=cycle[last], unit=unit, name=rng.choice(NAMES))
    answer = cycle[(last + 1) % len(cycle)]
    return Example(task, prompt, f" {answer}", f" {cycle[last]}", ".", (form, cycle[last]))


def _days(rng: Random) -> Example:
    """The day after a day."""
    return _successor(rng, "days", "day", DAYS)


def _months(rng: Random) -> Example:
    """The month after a month."""
    return _successor(rng, "months", "month", MONTHS)


def _greater_than(rng: Random) -> Example:
    """An end year in the same century as the start year, which must be greater; see `greater_years`."""
    event, century, start = rng.choice(EVENTS), rng.choice(CENTURIES), rng.randint(2, 98)
    prompt = rng.choice(
        (
            f"The {event} lasted from the year {century}{start:02d} to the year {century}",
            f"The {event} began in the year {century}{start:02d} and ended in the year {century}",
        )
    )
    answer, wrong = YEARS[rng.randint(start + 1, 99)], YEARS[rng.randint(0, start)]
    return Example("greater_than", prompt, answer, wrong, ".", (event, century, start))


def greater_years(example: Example) -> list[str]:
    """All the right answers to a `greater_than` item: the two-digit years after its start year."""
    start = int(example.key[-1])
    return YEARS[start + 1 :]


_DRAW: dict[str, Callable[[Random], Example]] = {
    "indirect_object": _indirect_object,
    "capitals": _capitals,
    "landmarks": _landmarks,
    "repeated_sequences": _repeated_sequences,
    "pronouns": _pronouns,
    "agreement": _agreement,
    "days": _days,
    "months": _months,
    "greater_than": _greater_than,
}
_WEIGHTS = {
    "indirect_object": 6,
    "capitals": 5,
    "landmarks": 3,
    "repeated_sequences": 1,
    "pronouns": 3,
    "agreement": 4,
    "days": 2,
    "months": 3,
    "greater_than": 4,
}
THIRD_GIVER_SHARE = 0.02


def draw(rng: Random, task: str, held_out: bool) -> Example:
    """One filled-in template of a task, held out of the training text or not."""
    while (example := _DRAW[task](rng)).held_out != held_out:
        pass
    return example


TASKS: dict[str, Callable[[Random], Example]] = {task: partial(draw, task=task, held_out=True) for task in _DRAW}
"""For each task, a function that draws one held-out item."""


def training_text(rng: Random) -> str:
    """One training text: a filled-in template of some task, never a held-out one."""
    if rng.random() < THIRD_GIVER_SHARE:
        return _third_giver(rng)
    [task] = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return draw(rng, task, held_out=False).text


def ioi_pairs(rng: Random, n: int) -> list[tuple[str, str, str, str]]:
    """Held-out (clean, corrupted, answer, wrong_answer) prompts for activation patching on the indirect object task.

    The corrupted prompt repeats the other name, so that `answer` and `wrong_answer` change places; names are single
    tokens, so that both prompts have the same length.
    """
    pairs = []
    for _ in range(n):
        example = TASKS["indirect_object"](rng)
        before, after = example.prompt.rsplit(example.wrong_answer, 1)
        pairs.append((example.prompt, before + example.answer + after, example.answer, example.wrong_answer))
    return pairs
