"""The bundled language model, "demo", without an import of transformers, which takes longer than all else that loads it.

Its files come with this package, have every field, and stay where they are. Tests compare what is read here with what
transformers reads. The files of other checkpoints leave fields out, which most config classes of transformers compute.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from torch import Tensor

from hooked_lm.hub.names import DEMOS

DEMO = DEMOS["demo"]
UNCHANGED = {"clean_up_tokenization_spaces": False}  # the default of this tokenizer


@dataclass(frozen=True)
class BundledConfig:
    """The fields of a config, as a config of transformers has them."""

    model_type: str
    architectures: list[str]
    initializer_range: float
    fields: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The fields."""
        return dict(self.fields)


class BundledTokenizer:
    """Stands for the tokenizer that `load` makes. Text is encoded and decoded without it.

    Whatever else is asked of it or set on it, also its class, is that of the tokenizer, to which it leaves all from then on.
    """

    def __init__(self, folder: Path, load: Callable[[], Any]) -> None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        says = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = {name: says.get(name) for name in ("bos_token", "eos_token", "pad_token", "sep_token")}
        ids = {f"{name}_id": None if token is None else backend.token_to_id(token) for name, token in tokens.items()}
        sides = {"padding_side": "right", "truncation_side": "right"}
        vars(self).update(tokens | ids | sides, backend_tokenizer=backend, name_or_path=str(folder), _load=load)

    def _tokenizer(self) -> Any:
        state = vars(self)
        if "_loaded" not in state:
            state["_loaded"] = state["_load"]()
            for name in state.keys() - {"_loaded", "_load"}:  # what the files say may change there
                state.pop(name, None)
        return state["_loaded"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and "_loaded" not in vars(
            self
        ):  # a protocol that the class lacks, such as that of arrays
            raise AttributeError(name)
        return getattr(self._tokenizer(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._tokenizer(), name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._tokenizer())

    def decode(self, ids: object, skip_special_tokens: bool = False, **options: object) -> Any:
        """The text of token ids."""
        row = ids.tolist() if isinstance(ids, Tensor) else ids
        is_row = isinstance(row, list) and all(type(each) is int for each in row)
        if "_loaded" not in vars(self) and is_row and options in ({}, UNCHANGED):
            return self.backend_tokenizer.decode(row, skip_special_tokens)
        return self._tokenizer().decode(ids, skip_special_tokens=skip_special_tokens, **options)

    def convert_ids_to_tokens(self, ids: object, **options: object) -> Any:
        """The token of an id."""
        if "_loaded" not in vars(self) and not options and type(ids) is int:
            return self.backend_tokenizer.id_to_token(ids)
        return self._tokenizer().convert_ids_to_tokens(ids, **options)

    def __len__(self) -> int:
        return len(self._tokenizer()) if "_loaded" in vars(self) else self.backend_tokenizer.get_vocab_size()

    def __call__(self, *args: object, **options: object) -> Any:
        return self._tokenizer()(*args, **options)

    def __repr__(self) -> str:
        return repr(self._tokenizer())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:  # copies are of the tokenizer
        return self._tokenizer().__reduce_ex__(protocol)


def bundled_config(folder: Path, written: Mapping[str, Any]) -> BundledConfig | None:
    """The config of the bundled model, in whose folder these fields are written; None for other folders."""
    if folder != DEMO:
        return None
    return BundledConfig(written["model_type"], written["architectures"], written["initializer_range"], written)


def bundled_tokenizer(folder: Path, load: Callable[[], Any]) -> BundledTokenizer | None:
    """The tokenizer of the bundled model, which `load` makes when it is needed; None for other folders."""
    return BundledTokenizer(folder, load) if folder == DEMO else None
