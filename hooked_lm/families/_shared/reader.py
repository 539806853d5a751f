"""A view of a checkpoint's config that records which fields were read, so that no field is ignored silently."""

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

# Globs of fields that do not change the forward pass (dropout is off; token ids matter for text only).
NO_EFFECT = (
    *("*dropout*", "*pdrop", "*_token_id", "*_token_ids", "initializer_range", "use_cache", "cache_implementation"),
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map", "tokenizer_class"),
    *("_*", "name_or_path", "attn_implementation", "use_flash_attn*", "unsloth_*", "pretraining_tp"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "summary_*"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_decoder"),
    *("gradient_checkpointing", "predict_special_tokens", "n_special", "is_llama_config", "max_sequence_length"),
    *("neftune_noise_alpha", "dequantized_from"),
)


class HFConfig:
    """A checkpoint's config with its fields as attributes; `defaults` are those of its config class.

    `tensors` are the checkpoint's tensor names, without the base model's prefix; they show which heads an encoder has.

    >>> hf = HFConfig(
    ...     {"width": 4, "twist": 2, "dropout": 0.1},
    ...     {"width": 8, "twist": 1, "dropout": 0.0},
    ... )
    >>> hf.width, hf.unread()
    (4, {'twist': 2})
    """

    def __init__(
        self, values: Mapping[str, object], defaults: Mapping[str, object], tensors: Collection[str] = ()
    ) -> None:
        self._values, self._defaults, self._read = dict(values), dict(defaults), set[str]()
        self._tensors = frozenset(tensors)
        self._parts, self._quiet = dict[str, HFConfig](), tuple[str, ...]()

    def __getattr__(self, field: str) -> Any:
        if field.startswith("__"):
            raise AttributeError(field)
        if field not in self._values:
            raise ValueError(f"the config has no field {field!r}; it has {', '.join(sorted(self._values))}")
        return self.get(field)

    def get(self, field: str, default: object = None) -> Any:
        """Returns a field, or `default` if the config lacks it."""
        self._read.add(field)
        return self._values.get(field, default)

    def part(self, field: str, no_effect: Collection[str] = ()) -> "HFConfig":
        """The config that a field holds. What is unread there, but for globs in `no_effect`, is unread here.

        >>> hf = HFConfig({"encoder": {"width": 4, "twist": 2}}, {})
        >>> hf.part("encoder").width, hf.unread()
        (4, {'encoder.twist': 2})
        """
        values, defaults = self.get(field), self._defaults.get(field)
        part = HFConfig(values, defaults if isinstance(defaults, Mapping) else {})
        part._quiet = tuple(no_effect)
        return self._parts.setdefault(field, part)

    def require(self, **supported: object) -> None:
        """Raises ValueError for fields with other values than these. A config may lack a field, or repeat it for each layer."""
        for field, given in self._others(supported).items():
            raise ValueError(f"{field}={given!r} is not supported; only {supported[field]!r} is")

    def ignored_by_transformers(self, **assumed: object) -> None:
        """As `require`, for fields that transformers does not read: with another value its model is not the trained one.

        >>> HFConfig({"twist": 2}, {}).ignored_by_transformers(twist=1)
        Traceback (most recent call last):
        ValueError: transformers ignores twist=2 and computes as with 1, so its model is not the one that was trained
        """
        for field, given in self._others(assumed).items():
            raise ValueError(
                f"transformers ignores {field}={given!r} and computes as with {assumed[field]!r}, so its model is not the one "
                "that was trained"
            )

    def _others(self, expected: Mapping[str, object]) -> dict[str, Any]:
        """The fields that are there with another value, or with another one for some layer."""
        found = {field: (self.get(field), only) for field, only in expected.items()}
        return {
            field: given
            for field, (given, only) in found.items()
            if given != only and any(v not in (None, only) for v in (given if isinstance(given, list) else [given]))
        }

    def changed(self, **values: object) -> "HFConfig":
        """This config with other values of some fields, which count as read. What is read in either counts in both.

        >>> hf = HFConfig({"width": 4}, {"width": 8})
        >>> hf.changed(width=hf.width + 1, depth=2).width, hf.unread()
        (5, {})
        """
        other = HFConfig({**self._values, **values}, self._defaults, self._tensors)
        other._read = self._read
        self._read.update(values)
        return other

    def holds(self, tensor: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return tensor in self._tensors

    def unread(self, no_effect: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields that were not read, differ from their default and may have an effect."""
        quiet, of_parts = (*NO_EFFECT, *self._quiet, *no_effect), dict[str, Any]()
        for name, part in self._parts.items():
            of_parts |= {f"{name}.{field}": value for field, value in part.unread(no_effect).items()}
        return of_parts | {
            field: value
            for field, value in self._values.items()
            if field not in self._read
            and not self._is_default(field, value)
            and not any(fnmatch.fnmatchcase(field, glob) for glob in quiet)
        }

    def _is_default(self, field: str, value: object) -> bool:
        """Whether a field has its default; for fields unknown to the config class that is None, False or empty."""
        if field in self._defaults:
            return bool(value == self._defaults[field])
        return value is None or value is False or value in ([], {})
