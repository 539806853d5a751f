"""Helpers for notebooks: site names, tensors, tokens, and predictions for a prompt."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.activations import gelu_tanh, solu
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, Slice, SliceInput
from hooked_lm.keywords import answer_keywords
from hooked_lm.models.generation.sampling import sample_logits
from hooked_lm.models.loss import lm_accuracy, lm_cross_entropy_loss
from hooked_lm.models.names import get_act_name
from hooked_lm.models.text.tokenizer import SidedTokenizer, Tokenizer
from hooked_lm.models.text.tokens import Tokens

__all__ = [
    "USE_DEFAULT_VALUE", "LocallyOverridenDefaults", "Slice", "SliceInput", "composition_scores", "gelu_fast",
    "gelu_new", "get_act_name", "get_attention_mask", "get_corner", "get_device", "get_offset_position_ids",
    "get_tokens_with_bos_removed", "lm_accuracy", "lm_cross_entropy_loss", "remove_batch_dim",
    "repeat_along_head_dimension", "sample_logits", "solu", "test_prompt", "to_numpy", "tokenize_and_concatenate",
]  # fmt: skip

USE_DEFAULT_VALUE = None
"""An argument with this value uses the model's default."""

gelu_new: Callable[[Tensor], Tensor] = gelu_tanh
"""GPT-2's tanh approximation of GELU."""
gelu_fast: Callable[[Tensor], Tensor] = gelu_tanh
"""The same function as `gelu_new`: a name of the HookedTransformer interface."""


# ---- numbers and shapes --------------------------------------------------------------------------------------------


def to_numpy(tensor: Any) -> np.ndarray:
    """Converts a tensor (of any dtype and device, with or without gradients), a list, a number or an array to an array.

    >>> import torch
    >>> to_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))
    array([1., 1.], dtype=float32)
    """
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if isinstance(tensor, (np.ndarray, list, tuple, int, float, bool, str)):
        return np.asarray(tensor)
    raise TypeError(f"to_numpy takes tensors, arrays, lists and numbers, got a {type(tensor).__name__}")


def get_corner(tensor: Any, n: int = 3) -> Any:
    """The first `n` entries along every axis.

    >>> import torch
    >>> get_corner(torch.arange(16).view(4, 4), 2)
    tensor([[0, 1],
            [4, 5]])
    """
    return tensor[(slice(n),) * tensor.ndim]


def remove_batch_dim(tensor: Tensor) -> Tensor:
    """The tensor without its first axis if that has length 1; otherwise the tensor."""
    return tensor[0] if tensor.shape[0] == 1 else tensor


def repeat_along_head_dimension(
    tensor: Float[Tensor, "batch pos d_model"], n_heads: int, clone_tensor: bool = True
) -> Float[Tensor, "batch pos head d_model"]:
    """One copy of the stream per head; with `clone_tensor=False` all heads share memory."""
    repeated = tensor[:, :, None].expand(-1, -1, n_heads, -1)
    return repeated.clone() if clone_tensor else repeated


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch pos"]
) -> Int[Tensor, "batch new"]:
    """The positions of the tokens after an offset, counting only real tokens (mask 1); padding on the left has position 0."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def composition_scores(left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True) -> Tensor:
    """`|left right| / (|left| |right|)` in Frobenius norms (Elhage et al. 2021), for every pair of their leading axes.

    With `broadcast_dims=False` the leading axes are matched instead. See `model.all_composition_scores`.

    >>> import torch
    >>> pair = FactoredMatrix(torch.eye(4), torch.eye(4))
    >>> composition_scores(pair, pair)
    tensor(0.5000)
    """
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(f"no product of {tuple(left.shape)} and {tuple(right.shape)}: the inner sizes differ")
    if broadcast_dims:
        n_left, n_right = left.ndim - 2, right.ndim - 2
        for axis in range(n_left):
            right = right.unsqueeze(axis)
        for axis in range(n_right):
            left = left.unsqueeze(n_left + axis)
    return (left @ right).norm() / (left.norm() * right.norm())


def get_device() -> str:
    """The default device of models: "cuda" if available, otherwise "cpu".

    With TRANSFORMERLENS_ALLOW_MPS=1 in the environment it is "mps" on an Apple GPU, which is else used only on request.
    """
    if torch.cuda.is_available():
        return "cuda"
    allows_mps = os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1" and torch.backends.mps.is_available()
    return "mps" if allows_mps else "cpu"


# ---- tokens --------------------------------------------------------------------------------------------------------


def get_attention_mask(
    tokenizer: SidedTokenizer | None,
    tokens: Int[Tensor, "batch pos"],
    prepend_bos: bool,
    padding_side: str | None = None,
) -> Int[Tensor, "batch pos"]:
    """1 for real tokens and 0 for padding, as `Tokens.attention_mask` reads it off ids; the tokenizer's side if None.

    Without a tokenizer all are real.
    """
    if tokenizer is None:
        return torch.ones_like(tokens)
    side = "left" if (padding_side or tokenizer.padding_side) == "left" else "right"
    text = Tokens(tokenizer, prepend_bos, side, n_ctx=tokens.shape[1], d_vocab=len(tokenizer))
    return text.attention_mask(tokens)


def get_tokens_with_bos_removed(
    tokenizer: SidedTokenizer, tokens: Int[Tensor, "*batch pos"], padding_side: str | None = None
) -> Int[Tensor, "*batch shorter"]:
    """The tokens without the BOS of each row, which is the first token, or the first after padding on the left."""
    if tokenizer.bos_token_id is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    if tokenizer.bos_token_id == tokenizer.pad_token_id:  # the last of the padding and BOS tokens on the left
        bos = ((tokens != tokenizer.pad_token_id).long().cumsum(-1) == 0).sum(-1, keepdim=True) - 1
    else:
        bos = (tokens == tokenizer.bos_token_id).long().argmax(-1, keepdim=True)
    kept = torch.arange(tokens.shape[-1], device=tokens.device) != bos
    return tokens[kept].view(*tokens.shape[:-1], -1)


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Tokenizer,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = None,
    set_format: bool = True,
) -> Any:
    """Texts, concatenated with the tokenizer's EOS and cut into rows of `max_length` tokens, each starting with BOS.

    An incomplete last row is dropped, unless it is the only one: then it is padded. A dataset of the library
    `datasets` gives a dataset (`streaming` and `num_proc` go to its `map`; of tensors, or with `set_format=False` of lists),
    a list of strings or dicts a list of dicts; their column is "tokens". Raises ValueError if the tokenizer lacks the
    special token.
    """
    for kind, needed in (("bos", add_bos_token), ("eos", True)):
        if needed and getattr(tokenizer, f"{kind}_token_id") is None:
            raise ValueError(f"the tokenizer has no {kind.upper()} token; set one, e.g. tokenizer.{kind}_token = '...'")
    if hasattr(dataset, "map"):
        processes = {} if streaming else {"num_proc": num_proc}
        rows = dataset.map(
            lambda batch: {"tokens": _rows(batch[column_name], tokenizer, max_length, add_bos_token).numpy()},
            batched=True,
            remove_columns=dataset.column_names,
            **processes,
        )
        return rows.with_format("torch") if set_format else rows
    texts = [entry if isinstance(entry, str) else entry[column_name] for entry in dataset]
    return [{"tokens": row} for row in _rows(texts, tokenizer, max_length, add_bos_token)]


def _rows(texts: Sequence[str], tokenizer: Tokenizer, max_length: int, bos: bool) -> Int[Tensor, "row max_length"]:
    """The rows of ids for `tokenize_and_concatenate`."""
    width, ids = max_length - bos, []
    for text in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []:
        ids += [*text, tokenizer.eos_token_id]
    ids = ids[:-1]  # EOS stands between texts, not after the last
    if 0 < len(ids) < width:
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ids += [pad] * (width - len(ids))
    rows = torch.tensor(ids[: len(ids) // width * width], dtype=torch.long).view(-1, width)
    if not bos:
        return rows
    assert tokenizer.bos_token_id is not None, "the caller checks it"
    return torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], 1)


# ---- models --------------------------------------------------------------------------------------------------------


class LocallyOverridenDefaults:
    """A context manager that overrides defaults of the model; the tokenizer is not changed.

    `overrides` are `prepend_bos` and `padding_side`; None keeps the default. Raises ValueError for anything else.
    """

    VALID: ClassVar = {"prepend_bos": (True, False, None), "padding_side": ("left", "right", None)}

    def __init__(self, model: HookedRootModule, **overrides: Any) -> None:
        for name, value in overrides.items():
            if name not in self.VALID:
                raise ValueError(f"'{name}' is not a default that can be overridden; {' and '.join(self.VALID)} are")
            if value not in self.VALID[name]:
                raise ValueError(f"{name} must be one of {self.VALID[name]}, got {value!r}")
        self.cfg = model.cfg
        self.overrides = {f"default_{name}": v for name, v in overrides.items() if v is not None}
        self.saved: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.saved = {name: getattr(self.cfg, name) for name in self.overrides}
        for name, value in self.overrides.items():
            setattr(self.cfg, name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, value in self.saved.items():
            setattr(self.cfg, name, value)


def test_prompt(
    prompt: str,
    answer: str | Sequence[str],
    model: HookedRootModule,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Prints the rank and probability of an answer (rank 0 is the most likely token), and the most likely tokens.

    An answer of several tokens is evaluated token by token, each after those before it; of several answers only the first
    token. `print_details=False` prints only the ranks.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> test_prompt("The capital of France is", "Paris", model, print_details=False)
    Ranks of the answer tokens: [(' Paris', 0)]
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [text if text.startswith(" ") else " " + text for text in answers]
    prompt_tokens = model.to_tokens(prompt, prepend_bos=prepend_bos)
    answer_tokens = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    steps = [[ids[0] for ids in answer_tokens]] if len(answers) > 1 else [[token] for token in answer_tokens[0]]
    inputs = prompt_tokens if len(answers) > 1 else torch.cat([prompt_tokens, answer_tokens[0][None, :-1]], 1)
    with torch.no_grad():
        logits = model(inputs)[0, prompt_tokens.shape[1] - 1 :]
    if print_details:
        _print_line("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        _print_line(
            "Tokenized answers:" if len(answers) > 1 else "Tokenized answer:",
            [model.to_str_tokens(ids) for ids in answer_tokens],
        )
    ranks = []
    for step, candidates in enumerate(steps):
        scores = logits[step]
        ranks.append([(model.to_string(token[None]), int((scores > scores[token]).sum())) for token in candidates])
        if print_details:
            for rank, token in [(rank, token) for (_, rank), token in zip(ranks[-1], candidates, strict=True)]:
                _print_line(f"Rank: {rank: <8}", _performance(model, scores, token), bold=True)
            for rank, token in enumerate(scores.topk(min(top_k, len(scores))).indices):
                _print_line(f"Top {rank}:", _performance(model, scores, token))
    _print_line("Ranks of the answer tokens:", ranks if len(answers) > 1 else [rank for [rank] in ranks], bold=True)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def _performance(model: HookedRootModule, scores: Float[Tensor, " d_vocab"], token: Tensor) -> str:
    prob = scores.float().softmax(0)[token]
    return f"Logit: {scores[token]:5.2f} Prob: {prob:6.2%} Token: |{model.to_string(token[None])}|"


def _print_line(title: str, value: object, bold: bool = False) -> None:
    """In bold where rich is installed, as plain text elsewhere."""
    try:
        from rich import print as rich_print
        from rich.markup import escape
    except ImportError:
        print(title, value)
    else:
        line = f"{escape(title)} {escape(str(value))}"
        rich_print(f"[b]{line}[/b]" if bold else line)


answer_keywords(__name__)
