"""A checkpoint's config that records which of its fields were read, so that no field is ignored silently."""

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

# Globs of fields that do not change what a forward pass computes (dropout is off; token ids concern text alone).
NO_EFFECT = (
    *(
        "*dropout*",
        "*pdrop",
        "*_token_id",
        "*_token_ids",
        "initializer_range",
        "use_cache",
        "cache_implementation",
    ),
    *(
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "auto_map",
        "tokenizer_class",
    ),
    *("_*", "name_or_path", "attn_implementation", "use_flash_attn*", "unsloth_*", "pretraining_tp"),
    *(
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "summary_*",
    ),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_decoder"),
    *(
        "gradient_checkpointing",
        "predict_special_tokens",
        "n_special",
        "is_llama_config",
        "max_sequence_length",
    ),
)


class HFConfig:
    """Fields of a checkpoint's config as attributes; `defaults` are those of its class.

    `tensors` are the names of its weights, without the prefix that those of a base model lack: what a config does not say
    of an encoder's heads, they do.

    >>> hf = HFConfig({"width": 4, "twist": 2, "dropout": 0.1}, {"width": 8, "twist": 1, "dropout": 0.0})
    >>> hf.width, hf.unread()
    (4, {'twist': 2})
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
        self._values, self._defaults, self._read = dict(values), dict(defaults), set[str]()
        self._tensors = frozenset(tensors)

    def __getattr__(self, field: str) -> Any:
        if field.startswith("__"):
            raise AttributeError(field)
        if field not in self._values:
            raise ValueError(f"the config has no field {field!r}; it has {', '.join(sorted(self._values))}")
        return self.get(field)

    def get(self, field: str, default: Any = None) -> Any:
        """Returns a field that the config may lack."""
        self._read.add(field)
        return self._values.get(field, default)

    def holds(self, tensor: str) -> bool:
        """Whether the checkpoint has a weight of this name."""
        return tensor in self._tensors

    def unread(self, no_effect: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields that were not read, differ from their default and may have an effect."""
        quiet = (*NO_EFFECT, *no_effect)
        return {
            field: value
            for field, value in self._values.items()
            if field not in self._read
            and not self._is_default(field, value)
            and not any(fnmatch.fnmatchcase(field, glob) for glob in quiet)
        }

    def _is_default(self, field: str, value: Any) -> bool:
        """Whether a field has its default; the default of a field that the class does not know is off or empty."""
        if field in self._defaults:
            return bool(value == self._defaults[field])
        return value is None or value is False or value in ([], {})
