"""Small text datasets on the hub, and the one closest to each model's training data."""

from typing import Any

from hooked_lm import hub_files

__all__ = ["DATASETS", "TRAINED_ON", "get_dataset"]

# short name -> hub id; each dataset has 10,000 to 20,000 texts
DATASETS = {
    "openwebtext": "stas/openwebtext-10k",
    "owt": "stas/openwebtext-10k",
    "pile": "NeelNanda/pile-10k",
    "c4": "NeelNanda/c4-10k",
    "code": "NeelNanda/code-10k",
    "python": "NeelNanda/code-10k",
    "c4_code": "NeelNanda/c4-code-20k",
    "c4-code": "NeelNanda/c4-code-20k",
    "wiki": "NeelNanda/wiki-10k",
}
# transformers class of a checkpoint -> the dataset closest to its training data
TRAINED_ON = {
    "GPT2LMHeadModel": "openwebtext",
    "GPTNeoForCausalLM": "pile",
    "GPTNeoXForCausalLM": "pile",
    "GPTJForCausalLM": "pile",
    "OPTForCausalLM": "pile",
}


def get_dataset(dataset_name: str, **kwargs: Any) -> Any:
    """Returns one of the small datasets of `DATASETS`, as a `datasets.Dataset` with the column "text".

    `kwargs` go to `datasets.load_dataset`. Raises ValueError for another name, ImportError if the package `datasets` is not
    installed.
    """
    if dataset_name not in DATASETS:
        raise ValueError(f"unknown dataset {dataset_name!r}; those known are {', '.join(DATASETS)}")
    return hub_files.dataset(DATASETS[dataset_name], split="train", **kwargs)
