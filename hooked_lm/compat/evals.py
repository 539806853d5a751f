"""Quick evaluations of language models: on one text, on data sets, on repeated tokens. Losses are in nats per token.

`evaluate` iterates over the lists `DATASET_NAMES` and `DATASET_LOADERS`, to which users can append.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader

from hooked_lm import hub_files
from hooked_lm.progress import tqdm
from hooked_lm.utils import lm_cross_entropy_loss, tokenize_and_concatenate

__all__ = [
    "DATASET_LOADERS", "DATASET_NAMES", "evaluate", "evaluate_on_dataset", "induction_loss", "make_code_data_loader",
    "make_owt_data_loader", "make_pile_data_loader", "make_wiki_data_loader", "sanity_check",
]  # fmt: skip

PLAIN_TEXT = (
    "The river has two banks. In spring, when the snow melts, its water rises and carries wood and sand down to the sea; "
    "in late summer children can walk across it without getting their knees wet. People have lived on both sides for "
    "more than a thousand years, and most of the bridges that they built were taken away by the water again."
)
LONGEST = 1024


def sanity_check(model: Any) -> Float[Tensor, ""]:
    """The loss on a short English text, truncated to the model's context.

    It is below 5 for a trained model of GPT-2's size. Above 7 something is wrong.

    >>> from hooked_lm import HookedTransformer
    >>> bool(
    ...     sanity_check(HookedTransformer.from_pretrained("demo")) > 5
    ... )  # it knows only its generated sentences
    True
    """
    with torch.no_grad():
        return model(model.to_tokens(PLAIN_TEXT), return_type="loss")


# ---- sets of texts -------------------------------------------------------------------------------------------------


def make_wiki_data_loader(
    tokenizer: Any, batch_size: int = 8, max_length: int = LONGEST, seed: int = 0
) -> DataLoader[Any]:
    """The training texts of WikiText-2 (Merity et al. 2016, arXiv:1609.07843) in batches of `{"tokens": [batch, pos]}`.

    The texts are concatenated, cut into rows of `max_length` tokens, and shuffled with `seed`.
    """
    texts = hub_files.dataset("Salesforce/wikitext", "wikitext-2-v1", split="train")
    return _loader(texts, tokenizer, batch_size, max_length, seed)


def make_owt_data_loader(
    tokenizer: Any, batch_size: int = 8, max_length: int = LONGEST, seed: int = 0
) -> DataLoader[Any]:
    """10,000 texts of OpenWebText, a replication of GPT-2's training data; see `make_wiki_data_loader`."""
    texts = hub_files.dataset("stas/openwebtext-10k", split="train")
    return _loader(texts, tokenizer, batch_size, max_length, seed)


def make_pile_data_loader(
    tokenizer: Any, batch_size: int = 8, max_length: int = LONGEST, seed: int = 0
) -> DataLoader[Any]:
    """10,000 texts of the Pile (Gao et al. 2020, arXiv:2101.00027); see `make_wiki_data_loader`."""
    texts = hub_files.dataset("NeelNanda/pile-10k", split="train")
    return _loader(texts, tokenizer, batch_size, max_length, seed)


def make_code_data_loader(
    tokenizer: Any, batch_size: int = 8, max_length: int = LONGEST, seed: int = 0
) -> DataLoader[Any]:
    """Python files of CodeParrot's validation set; see `make_wiki_data_loader`."""
    texts = hub_files.dataset("codeparrot/codeparrot-valid-v2-near-dedup", split="train")
    return _loader(texts, tokenizer, batch_size, max_length, seed, column="content")


def _loader(
    texts: Any, tokenizer: Any, batch_size: int, max_length: int, seed: int, column: str = "text"
) -> DataLoader[Any]:
    rows = tokenize_and_concatenate(texts, tokenizer, max_length=max_length, column_name=column)
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(rows, batch_size=batch_size, shuffle=True, drop_last=True, generator=generator)


DATASET_NAMES = ["wiki", "owt", "pile", "code"]
DATASET_LOADERS: list[Callable[..., Any]] = [
    make_wiki_data_loader,
    make_owt_data_loader,
    make_pile_data_loader,
    make_code_data_loader,
]


@torch.no_grad()
def evaluate_on_dataset(
    model: Any, data_loader: Iterable[Mapping[str, Any]], truncate: int = 100, device: Any = None
) -> float:
    """The mean loss over the first `truncate` batches of `{"tokens": [batch, pos]}`.

    The tokens are moved to `device`; None is the model's device. Raises ValueError if there is no batch.
    """
    device = model.cfg.device if device is None else device
    losses = [
        model(batch["tokens"].to(device), return_type="loss").mean().item()
        for batch in tqdm(islice(data_loader, truncate), desc="batches", leave=False)
    ]
    if not losses:
        raise ValueError("there is no batch to evaluate: the texts fill no batch, or truncate is 0")
    return sum(losses) / len(losses)


def evaluate(model: Any, truncate: int = 100, batch_size: int = 8, tokenizer: Any = None) -> dict[str, float]:
    """The loss on every data set of `DATASET_LOADERS`, `{"wiki_loss": ..., ...}`; rows fit into the model's context."""
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    length = {"max_length": model.cfg.n_ctx} if model.cfg.n_ctx < LONGEST else {}
    losses = {}
    for name, loader in zip(DATASET_NAMES, DATASET_LOADERS, strict=True):
        batches = loader(tokenizer=tokenizer, batch_size=batch_size, **length)
        losses[f"{name}_loss"] = evaluate_on_dataset(model, batches, truncate)
    return losses


# ---- repeated tokens -----------------------------------------------------------------------------------------------


@torch.no_grad()
def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    device: Any = None,
    seed: int = 0,
) -> Float[Tensor, ""]:
    """The loss on a repeated sequence of random tokens, which only a model that copies predicts (Olsson et al. 2022).

    `subseq_len` tokens, drawn uniformly without special tokens, occur twice. With `prepend_bos`, or if it is the model's
    default, a BOS replaces the first token. The mean is over the second copy, from its third token. Compare it with the log
    of the vocabulary size.

    Raises ValueError if twice `subseq_len` exceeds the model's context.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> loss = induction_loss(model, subseq_len=20)
    """
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    if 2 * subseq_len > model.cfg.n_ctx or subseq_len < 3:
        raise ValueError(f"subseq_len={subseq_len} must be at least 3, and at most half of n_ctx={model.cfg.n_ctx}")
    known, special = model.cfg.d_vocab, set[int]()
    if tokenizer is not None:
        known, special = min(known, len(tokenizer)), set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(known) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    once = ordinary[torch.randint(len(ordinary), (batch_size, subseq_len), generator=generator)]
    tokens = once.repeat(1, 2)
    if model.cfg.default_prepend_bos if prepend_bos is None else prepend_bos:
        if tokenizer is None or tokenizer.bos_token_id is None:
            raise ValueError("there is no BOS token to prepend: pass a tokenizer that has one, or prepend_bos=False")
        tokens[:, 0] = tokenizer.bos_token_id
    tokens = tokens.to(model.cfg.device if device is None else device)
    losses = lm_cross_entropy_loss(model(tokens, return_type="logits"), tokens, per_token=True)
    return losses[:, subseq_len + 1 :].mean()
