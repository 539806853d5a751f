"""Indirect-object identification (Wang et al. 2022, arXiv:2211.00593)."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hooked_lm.progress import tqdm

__all__ = ["IOIDataset", "ioi_eval"]

NAMES = ("Alice", "David", "Emma", "George", "Helen", "James", "John", "Laura", "Mark", "Mary", "Peter", "Sarah")
TEMPLATES = (
    "After [A] and [B] arrived at the [LOCATION], [B] passed the [OBJECT] to [A]",
    "While [B] and [A] were working at the [LOCATION], [B] gave the [OBJECT] to [A]",
    "[A] met [B] at the [LOCATION] this morning. [B] handed the [OBJECT] to [A]",
)
NOUNS = {
    "LOCATION": ("school", "station", "office", "library", "garden"),
    "OBJECT": ("letter", "ball", "ring", "book", "basket"),
}


class IOIDataset(Dataset[dict[str, Tensor]]):
    """Sentences with an indirect object (IO, the receiver) and a subject (S, the giver).

    An item is `{"prompt": ids, "IO": ids, "S": ids}`: the whole sentence, which ends with the receiver's name, and both names
    with the space before them.

    Args:
        tokenizer: converts text to ids; of its special tokens only the BOS is used.
        templates: sentences with [A] for the receiver, at the end too, [B] for the giver, and kinds of nouns in brackets; the
            same kind is the same noun within a sentence.
        names: the names; each sentence has two different ones.
        nouns: the nouns of each kind.
        num_samples: the number of sentences.
        symmetric: each sentence is followed by one with the names swapped (an odd `num_samples` is rounded down).
        prepend_bos: whether a prompt begins with the BOS.
        seed: the seed of the sentences; None draws new ones each time.

    Raises ValueError for fewer than two names, and for a template that does not end with [A].

    >>> from hooked_lm import HookedTransformer
    >>> data = IOIDataset(
    ...     HookedTransformer.from_pretrained("demo").tokenizer,
    ...     num_samples=2,
    ...     symmetric=True,
    ...     seed=0,
    ... )
    >>> first, second = data.samples
    >>> first["IO"] == second["S"], first["text"].endswith(first["IO"])
    (True, True)
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        nouns: dict[str, list[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer, self.prepend_bos = tokenizer, prepend_bos
        self.templates = self.get_default_templates() if templates is None else list(templates)
        self.names = self.get_default_names() if names is None else list(names)
        self.nouns = self.get_default_nouns() if nouns is None else nouns
        if len(set(self.names)) < 2:
            raise ValueError(f"a sentence needs two different names, got {self.names}")
        for template in self.templates:
            if not template.endswith(" [A]"):
                raise ValueError(f"a template must end with ' [A]', the receiver's name: {template!r}")
        if prepend_bos and tokenizer.bos_token_id is None:
            raise ValueError("the tokenizer has no BOS token: set tokenizer.bos_token, or pass prepend_bos=False")
        self._random = random.Random(seed)
        self.samples: list[dict[str, str]] = []
        for _ in range(num_samples // 2 if symmetric else num_samples):
            self.samples += self.get_sample(symmetric)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        sample = self.samples[idx]
        bos = [self.tokenizer.bos_token_id] if self.prepend_bos else []
        ids = {name: self.tokenizer.encode(text, add_special_tokens=False) for name, text in sample.items()}
        return {
            "prompt": torch.tensor(bos + ids["text"]),
            "IO": torch.tensor(ids["IO"]),
            "S": torch.tensor(ids["S"]),
        }

    def get_sample(self, symmetric: bool = False) -> list[dict[str, str]]:
        """A new sentence, `{"text", "IO", "S"}`; two if `symmetric`."""
        template = self._random.choice(self.templates)
        for kind, nouns in self.nouns.items():
            template = template.replace(f"[{kind}]", self._random.choice(nouns))
        a, b = self._random.sample(list(dict.fromkeys(self.names)), 2)
        return [
            {"text": template.replace("[A]", receiver).replace("[B]", giver), "IO": f" {receiver}", "S": f" {giver}"}
            for receiver, giver in ([(a, b), (b, a)] if symmetric else [(a, b)])
        ]

    @staticmethod
    def get_default_names() -> list[str]:
        return list(NAMES)

    @staticmethod
    def get_default_templates() -> list[str]:
        return list(TEMPLATES)

    @staticmethod
    def get_default_nouns() -> dict[str, list[str]]:
        return {kind: list(nouns) for kind, nouns in NOUNS.items()}


@torch.no_grad()
def ioi_eval(
    model: Any,
    dataset: Any = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """The logit difference between receiver and giver, at the first token in which their names differ.

    "Logit Difference" is the mean over the sentences, "Accuracy" the share with a positive difference. `dataset` has items
    like those of `IOIDataset`; by default `num_samples` are drawn. Raises ValueError if the tokens of one name are a prefix of
    the other's.
    """
    if dataset is None:
        dataset = IOIDataset(tokenizer or model.tokenizer, num_samples=num_samples, symmetric=symmetric)
    differences: list[float] = []
    batches: Any = DataLoader(dataset, batch_size=batch_size, collate_fn=list)
    for items in tqdm(batches, desc="sentences", leave=False):
        prompts = [item["prompt"] for item in items]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # padding after the last token that is read
        logits = model(tokens.to(model.cfg.device), return_type="logits")
        for row, item in zip(logits, items, strict=True):
            at = _first_difference(item["IO"], item["S"])
            scores = row[len(item["prompt"]) - len(item["IO"]) + at - 1]
            differences.append((scores[item["IO"][at]] - scores[item["S"][at]]).item())
    if not differences:
        raise ValueError("the data set is empty")
    return {
        "Logit Difference": sum(differences) / len(differences),
        "Accuracy": sum(difference > 0 for difference in differences) / len(differences),
    }


def _first_difference(first: Tensor, second: Tensor) -> int:
    for at, (one, other) in enumerate(zip(first.tolist(), second.tolist(), strict=False)):
        if one != other:
            return at
    raise ValueError(f"one name is a prefix of the other: tokens {first.tolist()} and {second.tolist()}")
