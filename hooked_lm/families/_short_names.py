"""Familiar short names of models on the hub, and the checkpoints of training runs that were published."""

_PYTHIA = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
_STANFORD = {
    "small": ("alias-{}-x21", "battlestar-{}-x49", "caprica-{}-x81", "darkmatter-{}-x343", "expanse-{}-x777"),
    "medium": ("arwen-{}-x21", "beren-{}-x49", "celebrimbor-{}-x81", "durin-{}-x343", "eowyn-{}-x777"),
}

# lower case -> hub id
SHORT_NAMES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-small": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distillgpt2": "distilbert/distilgpt2",
    "distilgpt2": "distilbert/distilgpt2",
    **{
        f"stanford-gpt2-{size}-{letter}": "stanford-crfm/" + name.format(f"gpt2-{size}")
        for size, names in _STANFORD.items()
        for letter, name in zip("abcde", names, strict=True)
    },
    **{f"pythia-{size}": f"EleutherAI/pythia-{size}" for size in _PYTHIA},
    **{f"pythia-{size}-deduped": f"EleutherAI/pythia-{size}-deduped" for size in _PYTHIA[2:]},
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    "gpt-neox": "EleutherAI/gpt-neox-20b",
    "gpt": "openai-community/openai-gpt",
    **{f"gpt-neo-{size.lower()}": f"EleutherAI/gpt-neo-{size}" for size in ("125m", "1.3B", "2.7B")},
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    "gpt-j": "EleutherAI/gpt-j-6b",
    **{f"opt-{size}": f"facebook/opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
    **{f"bloom-{size}": f"bigscience/bloom-{size}" for size in ("560m", "1b1", "1b7", "3b", "7b1")},
    "santacoder": "bigcode/gpt_bigcode-santacoder",
    "llama-7b": "huggyllama/llama-7b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-30b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    **{f"llama-2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"llama-2-{size}-chat": f"meta-llama/Llama-2-{size}-chat-hf" for size in ("7b", "13b", "70b")},
    "codellama-7b": "codellama/CodeLlama-7b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.1",
    "mistral-nemo-base-2407": "mistralai/Mistral-Nemo-Base-2407",
    **{f"qwen1.5-{s.lower()}": f"Qwen/Qwen1.5-{s}" for s in ("0.5B", "1.8B", "4B", "7B", "14B")},
    **{f"qwen2-{s.lower()}": f"Qwen/Qwen2-{s}" for s in ("0.5B", "1.5B", "7B")},
    **{f"qwen2-{s.lower()}-instruct": f"Qwen/Qwen2-{s}-Instruct" for s in ("0.5B", "1.5B", "7B")},
    **{f"qwen2.5-{s.lower()}": f"Qwen/Qwen2.5-{s}" for s in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")},
    **{
        f"qwen2.5-{s.lower()}-instruct": f"Qwen/Qwen2.5-{s}-Instruct"
        for s in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    **{f"qwen3-{s.lower()}": f"Qwen/Qwen3-{s}" for s in ("0.6B", "1.7B", "4B", "8B", "14B")},
    **{f"gemma-2-{size}": f"google/gemma-2-{size}" for size in ("2b", "9b", "27b")},
    **{f"gemma-2-{size}-it": f"google/gemma-2-{size}-it" for size in ("2b", "9b", "27b")},
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4": "microsoft/phi-4",
}

# glob of hub ids -> name of the revision of a step, and the steps that were saved
CHECKPOINTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "EleutherAI/pythia-*": ("step{}", (0, *(2**i for i in range(10)), *range(1000, 143_001, 1000))),
    "stanford-crfm/*": (
        "checkpoint-{}",
        (*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000)),
    ),
}
