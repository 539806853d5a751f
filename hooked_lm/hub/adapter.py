"""Adapters (LoRA and others of PEFT) in a folder of their own: the model that they were trained on, with them merged into it."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hooked_lm.extras import quiet_torchao
from hooked_lm.hub.hf_checkpoint import HFCheckpoint, from_model
from hooked_lm.hub.options import Options
from hooked_lm.hub.source import WEIGHT_FILES, Directory, Source, find, has_tokenizer
from hooked_lm.weights import open_checkpoint

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# task of the adapter -> the transformers class of the model under it
TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
BY_HAND = (
    "load it with peft, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder), and pass the result: "
    "from_pretrained(base, hf_model=...)"
)


def find_adapter(source: Source) -> Path | None:
    """The folder of a source that has an adapter and no model; None for any other."""
    if isinstance(source, Directory):
        is_adapter = source.file(CONFIG).is_file() and not source.file("config.json").is_file()
        return source.path if is_adapter else None
    if source.has_config:
        return None
    try:
        folder = source.file(CONFIG).parent
    except ValueError:
        return None
    source.file(WEIGHTS)
    return folder


@quiet_torchao()
def from_adapter(source: Source, folder: Path, options: Options) -> HFCheckpoint:
    """The checkpoint of the model under an adapter, with the adapter merged into its weights by peft.

    Raises ValueError if peft is missing, and for an adapter that does not say what it belongs to.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base, kind = config["base_model_name_or_path"], _class_under(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} does not say which model the adapter belongs to; {BY_HAND}") from error
    if not isinstance(base, str):
        raise ValueError(
            f"{folder / CONFIG} does not say which model the adapter belongs to: base_model_name_or_path is {base!r}; {BY_HAND}"
        )
    what = f"{source.name!r} is an adapter ({config.get('peft_type') or 'PEFT'}) of {base!r}, not a model"
    if kind is None:
        raise ValueError(f"{what}, and its task_type is {config.get('task_type')!r}; {BY_HAND}")
    if find_spec("peft") is None:
        raise ValueError(f"{what}: pip install peft, and load it again, with the adapter merged into the weights")
    under = find(base, WEIGHT_FILES, **{**options.download, "revision": config.get("revision")})
    try:
        model = _merged(under.folder(), folder, kind, options)
    except Exception as error:  # of many kinds: transformers and peft raise whatever a file leads to
        raise ValueError(f"{what}, and the two could not be merged: {type(error).__name__}: {error}") from error
    named = source if has_tokenizer(folder) else under
    checkpoint = from_model(named, replace(options, hf_model=model))
    return replace(checkpoint, labels={**checkpoint.labels, "model_name": Path(source.name).name})


def _class_under(config: dict[str, Any]) -> Any:
    """The transformers class of the model under an adapter: that of its task, or, where peft was given none, the class that peft
    noted; None if there is neither."""
    import transformers

    mapping = config.get("auto_mapping") or {}
    noted = getattr(transformers, str(mapping.get("base_model_class")), None)
    is_model = isinstance(noted, type) and issubclass(noted, transformers.PreTrainedModel)
    task = config.get("task_type")
    return getattr(transformers, TASKS[task]) if task in TASKS else noted if is_model else None


def _merged(base: Path, adapter: Path, kind: type[Any], options: Options) -> Any:
    """The transformers model under an adapter, with the adapter merged into its weights.

    transformers and peft draw weights that a file lacks at random. Raises ValueError for these.
    """
    import peft

    dtype = options.dtype if isinstance(options.dtype, str) else str(options.dtype).removeprefix("torch.")
    model, found = kind.from_pretrained(
        base, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    adapted: Any = peft.PeftModel.from_pretrained(model, adapter)
    needed = {*peft.get_peft_model_state_dict(adapted)}
    weights = open_checkpoint(adapter / (WEIGHTS if (adapter / WEIGHTS).is_file() else PICKLE))
    if lacking := sorted(needed ^ {*weights}):
        raise ValueError(
            f"{weights.where} does not fit its {CONFIG}: it lacks, or has beside, {', '.join(lacking[:5])}"
        )
    trained = {name.removeprefix("base_model.model.") for name in needed}  # a head that the model under it lacks
    if missing := sorted({*found["missing_keys"]} - trained):
        raise ValueError(f"the checkpoint in {base} has no {', '.join(missing[:5])}")
    return adapted.merge_and_unload()
