"""IQuest-Coder (IQuest Lab 2026, github.com/IQuestLab/IQuest-Coder-V1): LLaMA under its own name."""

from hooked_lm.families.decoders.llama import IGNORED, PREFIX, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# Without windows it has no meaning. A `sliding_window` is refused: the cache of transformers has it, its attention has not.
NO_EFFECT = ("max_window_layers",)
