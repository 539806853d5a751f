"""MMLU: multiple-choice questions of 57 subjects (Hendrycks et al. 2020, arXiv:2009.03300)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hooked_lm import hub_files
from hooked_lm.progress import tqdm

__all__ = ["MMLU_ANSWER_LETTERS", "MMLU_SUBJECTS", "make_mmlu_data_loader", "mmlu_eval"]

MMLU_ANSWER_LETTERS = ["A", "B", "C", "D"]
MMLU_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics
econometrics electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology
high_school_chemistry high_school_computer_science high_school_european_history high_school_geography
high_school_government_and_politics high_school_macroeconomics high_school_mathematics high_school_microeconomics
high_school_physics high_school_psychology high_school_statistics high_school_us_history high_school_world_history
human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning management marketing
medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory professional_accounting
professional_law professional_medicine professional_psychology public_relations security_studies sociology
us_foreign_policy virology world_religions
""".split()  # noqa: SIM905 (57 lines otherwise)


def make_mmlu_data_loader(
    subjects: str | Sequence[str] | None = None, split: str = "test", num_samples: int | None = None
) -> list[dict[str, Any]]:
    """Questions as `{"question", "choices", "answer", "subject"}`; the answer is the index of the right choice.

    `subjects` are one, several, or all (None) of `MMLU_SUBJECTS`; `split` is "test", "validation" or "dev"; `num_samples`
    limits the questions of each subject. Raises ValueError for an unknown subject.
    """
    wanted = MMLU_SUBJECTS if subjects is None else [subjects] if isinstance(subjects, str) else list(subjects)
    if unknown := [subject for subject in wanted if subject not in MMLU_SUBJECTS]:
        raise ValueError(f"unknown subjects {', '.join(unknown)}; known are {', '.join(MMLU_SUBJECTS)}")
    found = []
    for subject in wanted:
        rows = list(hub_files.dataset("cais/mmlu", subject, split=split))[:num_samples]
        found += [
            {name: row[name] for name in ("question", "choices", "answer")} | {"subject": subject} for row in rows
        ]
    return found


@torch.no_grad()
def mmlu_eval(
    model: Any,
    tokenizer: Any = None,
    subjects: str | Sequence[str] | None = None,
    split: str = "test",
    num_samples: int | None = None,
) -> dict[str, Any]:
    """The zero-shot accuracy on MMLU; the model's answer is the letter with the highest logit.

    Returns "accuracy", "num_correct", "num_total", and "subject_scores", the accuracy by subject. For the arguments see
    `make_mmlu_data_loader`; `tokenizer` is by default the model's.
    """
    questions = make_mmlu_data_loader(subjects, split, num_samples)
    if not questions:
        raise ValueError("there are no questions: num_samples is 0, or the split is empty")
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    letters = [_letter_id(tokenizer, letter) for letter in MMLU_ANSWER_LETTERS]
    right = defaultdict[str, list[bool]](list)
    for question in tqdm(questions, desc="questions", leave=False):
        tokens = torch.tensor([tokenizer.encode(_prompt(question))], device=model.cfg.device)
        scores = model(tokens, return_type="logits")[0, -1, letters[: len(question["choices"])]]
        right[question["subject"]].append(int(scores.argmax()) == question["answer"])
    correct = sum(map(sum, right.values()))
    return {
        "accuracy": correct / len(questions),
        "num_correct": correct,
        "num_total": len(questions),
        "subject_scores": {subject: sum(answers) / len(answers) for subject, answers in right.items()},
    }


def _prompt(question: dict[str, Any]) -> str:
    choices = zip(MMLU_ANSWER_LETTERS, question["choices"], strict=False)
    lines = [question["question"], *(f"{letter}. {choice}" for letter, choice in choices), "Answer:"]
    return "\n".join(lines)


def _letter_id(tokenizer: Any, letter: str) -> int:
    """The token of a letter, with a leading space if there is such a token."""
    for text in (f" {letter}", letter):
        if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1:
            return ids[0]
    raise ValueError(f"the tokenizer has no token for the answer {letter!r}")
