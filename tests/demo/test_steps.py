"""The bundled reasoning model, and the additions that it was trained on."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm import HookedTransformer
from hooked_lm.demo import steps

MOST = 160  # tokens of a solution
greedy = {"max_new_tokens": MOST, "do_sample": False, "verbose": False}


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo-steps")


def written(model: HookedTransformer, addition: steps.Addition, **options) -> steps.Solution:
    """The solution that the model writes."""
    asked = model.chat([{"role": "user", "content": addition.text}], add_generation_prompt=True)
    *_, said = asked.reply(model, **options).messages[0]
    return steps.read_solution(addition, said["reasoning_content"], said["content"])


@given(st.randoms(use_true_random=False), st.booleans())
def test_solutions_are_read_as_they_are_written_and_their_answer_follows_from_the_columns(rng, has_choice):
    addition = steps.random_addition(rng, has_choice=has_choice)
    solution = steps.random_solution(addition, rng)
    assert steps.read_solution(addition, solution.thought, solution.answer) == solution
    columns = [one.text for one in solution.sentences if one.kind == "column"]
    digits = "".join(text.split("write ")[1][0] for text in reversed(columns))
    assert solution.answer == columns[-1][-2].replace("0", "") + digits
    right = steps.random_solution(addition, rng, error_rate=0.0)
    assert int(right.answer) in {addition.first + other for other in addition.others}


@given(st.randoms(use_true_random=False))
def test_what_a_sentence_depends_on_is_what_changes_it(rng):
    """With another sum of one column, the next column and the answer change, and no other sentence."""
    addition = steps.random_addition(rng, has_choice=True)
    numbers, place = [addition.first, addition.others[0]], rng.randrange(3)
    sums, other = [], []
    for at in range(3):
        terms = sum(number // 10**at % 10 for number in numbers)
        sums.append(terms + (sums[-1] // 10 if sums else 0))
        carried = other[-1] // 10 if other else 0
        other.append((sums[at] + 10) % 20 if at == place else terms + carried)
    before, after = (steps.solution(numbers, addition, given) for given in (sums, other))
    changed = 2 * place + 2
    assert before.sentences[changed].kind == "column"
    assert before.sentences[changed] != after.sentences[changed]
    for i in range(changed + 1, len(before.sentences)):
        if not before.depends[i, changed:].any():
            assert before.sentences[i] == after.sentences[i]
    if place < 2:
        assert before.sentences[changed + 2] != after.sentences[changed + 2]
    assert before.answer != after.answer


def test_held_out_sums_are_an_eighth():
    rng = random.Random(0)
    drawn = [steps.Addition(rng.randint(100, 999), (rng.randint(100, 999),)) for _ in range(4000)]
    share = sum(one.is_held_out[0] for one in drawn) / len(drawn)
    assert abs(share - 1 / 8) < 0.02
    assert all(steps.random_addition(rng, held_out=True).is_held_out[0] for _ in range(20))
    assert not any(any(steps.random_addition(rng).is_held_out) for _ in range(20))


@pytest.mark.parametrize("text", ["I take 36", "Tens: 1 + 2 = 3, write 3.", "Who knows?"])
def test_other_sentences_are_refused(text):
    with pytest.raises(ValueError, match="no sentence of an addition starts at"):
        steps.read_solution(steps.Addition(1, (2,)), f"I take 36. {text}", "3")


def test_the_model_solves_what_is_held_out(model):
    rng = random.Random(5)
    for has_choice in (False, True, True):
        addition = steps.random_addition(rng, held_out=True, has_choice=has_choice)
        assert int(written(model, addition, **greedy).answer) in {addition.first + other for other in addition.others}


def test_the_model_goes_on_with_what_was_written(model):
    """With another sum of the ones, the carry of the tens and the answer are those that follow from it."""
    addition = steps.random_addition(random.Random(8), held_out=True, has_choice=False)
    numbers = [addition.first, addition.others[0]]
    for total in (2, 17):
        sums = [total]
        for place in (1, 2):
            sums.append(sum(number // 10**place % 10 for number in numbers) + sums[-1] // 10)
        expected = steps.solution(numbers, sums=sums)
        whole = model.chat(expected.messages)
        place = whole.texts[0].index(" Good. Tens")
        start = next(i for i, (first, _) in enumerate(whole.offsets[0]) if first >= place)
        reply = whole[0, :start].reply(model, **greedy)
        assert reply.messages[0][-1]["content"] == expected.answer


def test_sites_of_the_model_mean_what_they_say(model):
    assert model.verify().ok


def test_thoughts_before_the_last_question_are_left_out(model):
    said = steps.solution([347, 136]).messages
    chat = model.chat([*said, {"role": "user", "content": "Add 1 to 2."}])
    assert "<think>" not in chat.texts[0]
    assert "<think>" in model.chat(said).texts[0]
    asked = model.chat(said[:1], add_generation_prompt=True)
    assert model.chat(said).n_common(asked) == asked.shape[1]
