"""Short names of models on the hub, and the published checkpoints of training runs."""

_PYTHIA = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
_STANFORD = {
    "small": ("alias-{}-x21", "battlestar-{}-x49", "caprica-{}-x81", "darkmatter-{}-x343", "expanse-{}-x777"),
    "medium": ("arwen-{}-x21", "beren-{}-x49", "celebrimbor-{}-x81", "durin-{}-x343", "eowyn-{}-x777"),
}

# Former and alternative names of model sizes.
_PYTHIA_BEFORE = {
    "19m": "70m",
    "125m": "160m",
    "350m": "410m",
    "800m": "1b",
    "1.3b": "1.4b",
    "2.7b": "2.8b",
    "6.7b": "6.9b",
    "13b": "12b",
}
_PYTHIA_NAMES = {**{size: size for size in _PYTHIA[2:]}, **_PYTHIA_BEFORE}
_NEO = {"small": "125m", "medium": "1.3B", "large": "2.7B"}
_OPT = dict(zip(("small", "medium", "large", "xl", "xxl", "xxxl", "xxxxl"),
                ("125m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b"), strict=True))  # fmt: skip
_TINY_STORIES = {size.lower(): size for size in ("1M", "3M", "8M", "28M", "33M")} | {"2l-33m": "2Layers-33M"}
_OLMO_3 = ("3-1025-7B", "3-1125-32B", "3-7B-Think", "3-7B-Instruct", "3-32B-Think", "3.1-32B-Think", "3.1-32B-Instruct")
_GEMMA = ("2b", "2b-it", "7b", "7b-it", "3-270m", "3-270m-it", "3-1b-pt", "3-1b-it")
_STABLELM = {f"{kind}-{size}": f"{kind}-alpha-{size}" for kind in ("base", "tuned") for size in ("3b", "7b")}

# TransformerLens's toy models: width by number of layers, and the version numbers of early ones.
_SOLU = {1: 512, 2: 512, 3: 512, 4: 512, 6: 768, 8: 1024, 10: 1280, 12: 1536}
_EARLY_SOLU = {1: 9, 2: 10, 4: 11, 6: 13, 8: 21, 10: 22, 12: 23}
_TOYS = {
    **{f"attn-only-{n}l": f"Attn_Only_{n}L512W_C4_Code" for n in range(1, 5)},
    **{f"gelu-{n}l": f"GELU_{n}L512W_C4_Code" for n in range(1, 5)},
    **{f"solu-{n}l": f"SoLU_{n}L{width}W_C4_Code" for n, width in _SOLU.items()},
}
_TWO_LAYERS = (
    "attn-only-2l-demo",
    "attn-only-2l-shortformer-6b-big-lr",
    "attn-only-2l-induction-demo",
    "attn-only-demo",
)

BUNDLED_NAMES = ("demo", "demo-shapes", "demo-steps", "demo-sparse")
# lower case -> hub id
SHORT_NAMES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-small": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    **dict.fromkeys(("distillgpt2", "distill-gpt2", "distil-gpt2", "gpt2-xs"), "distilbert/distilgpt2"),
    "distilgpt2": "distilbert/distilgpt2",
    **{
        f"stanford-gpt2-{size}-{letter}": "stanford-crfm/" + name.format(f"gpt2-{size}")
        for size, names in _STANFORD.items()
        for letter, name in zip("abcde", names, strict=True)
    },
    **{
        name.format(f"gpt2-{size}"): "stanford-crfm/" + name.format(f"gpt2-{size}")
        for size, names in _STANFORD.items()
        for name in names
    },
    **{
        f"gpt2-{place}-small-{letter}": "stanford-crfm/" + name.format(f"gpt2-{size}")
        for size, place in (("small", "mistral"), ("medium", "medium"))
        for letter, name in zip("abcde", _STANFORD[size], strict=True)
    },
    **{
        f"gpt2-stanford-{size}-{letter}": "stanford-crfm/" + name.format(f"gpt2-{size}")
        for size, names in _STANFORD.items()
        for letter, name in zip("abcde", names, strict=True)
    },
    **{f"pythia-{size}": f"EleutherAI/pythia-{size}" for size in _PYTHIA},
    **{
        f"pythia-{size}{kind}": f"EleutherAI/pythia-{now}{kind}"
        for size, now in _PYTHIA_NAMES.items()
        for kind in ("", "-deduped", "-v0", "-deduped-v0")
    },
    **{
        f"{owner}pythia-{size}-seed{seed}": f"EleutherAI/pythia-160m-seed{seed}"
        for owner, sizes in (("", ("160m", "125m")), ("eleutherai/", ("125m",)))
        for size in sizes
        for seed in (1, 2, 3)
    },
    **{
        f"eleutherai/pythia-{size}{kind}": f"EleutherAI/pythia-{now}{kind}"
        for size, now in _PYTHIA_BEFORE.items()
        for kind in ("", "-deduped", "-v0", "-deduped-v0")
    },
    "pythia": "EleutherAI/pythia-70m",
    "pythia-v0": "EleutherAI/pythia-70m-v0",
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    **dict.fromkeys(("gpt-neox", "neox"), "EleutherAI/gpt-neox-20b"),
    "gpt": "openai-community/openai-gpt",
    **{f"gpt-neo-{size.lower()}": f"EleutherAI/gpt-neo-{size}" for size in ("125m", "1.3B", "2.7B")},
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    **dict.fromkeys(("gpt-j", "gptj"), "EleutherAI/gpt-j-6b"),
    **{f"{name}-{size}": f"EleutherAI/gpt-neo-{now}" for name in ("gpt-neo", "neo") for size, now in _NEO.items()},
    "neo": "EleutherAI/gpt-neo-125m",
    **{f"opt-{size}": f"facebook/opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
    **{f"opt-{size}": f"facebook/opt-{now}" for size, now in _OPT.items()},
    "opt": "facebook/opt-125m",
    **{f"bloom-{size}": f"bigscience/bloom-{size}" for size in ("560m", "1b1", "1b7", "3b", "7b1")},
    **dict.fromkeys(("santacoder", "bigcode/santacoder"), "bigcode/gpt_bigcode-santacoder"),
    "llama-7b": "huggyllama/llama-7b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-30b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    **{f"llama-2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"llama-2-{size}-chat": f"meta-llama/Llama-2-{size}-chat-hf" for size in ("7b", "13b", "70b")},
    **{f"llama-{size}-hf": f"huggyllama/llama-{size}" for size in ("7b", "13b", "30b", "65b")},
    "meta-llama-2-70b-chat-hf": "meta-llama/Llama-2-70b-chat-hf",
    "codellamallama-2-7b": "codellama/CodeLlama-7b-hf",
    "codellama-7b": "codellama/CodeLlama-7b-hf",
    "codellama-7b-python": "codellama/CodeLlama-7b-Python-hf",
    "codellama-7b-instruct": "codellama/CodeLlama-7b-Instruct-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3-70b-instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
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
    **{f"qwen1.5-{s.lower()}-chat": f"Qwen/Qwen1.5-{s}-Chat" for s in ("0.5B", "1.8B", "4B", "7B", "14B")},
    **{f"qwen2-{s.lower()}": f"Qwen/Qwen2-{s}" for s in ("0.5B", "1.5B", "7B")},
    **{f"qwen2-{s.lower()}-instruct": f"Qwen/Qwen2-{s}-Instruct" for s in ("0.5B", "1.5B", "7B")},
    **{f"qwen2.5-{s.lower()}": f"Qwen/Qwen2.5-{s}" for s in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")},
    **{
        f"qwen2.5-{s.lower()}-instruct": f"Qwen/Qwen2.5-{s}-Instruct"
        for s in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    **{f"qwen3-{s.lower()}": f"Qwen/Qwen3-{s}" for s in ("0.6B", "1.7B", "4B", "8B", "14B")},
    "qwen3-0.6b-base": "Qwen/Qwen3-0.6B-Base",
    "qwen-32b-preview": "Qwen/QwQ-32B-Preview",
    **{f"gemma-{name}": f"google/gemma-{name}" for name in _GEMMA},
    **{f"gemma-2-{size}": f"google/gemma-2-{size}" for size in ("2b", "9b", "27b")},
    **{f"gemma-2-{size}-it": f"google/gemma-2-{size}-it" for size in ("2b", "9b", "27b")},
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4": "microsoft/phi-4",
    **{name: f"microsoft/{name}" for name in ("phi-1", "phi-1_5", "phi-2")},
    **dict.fromkeys(("mixtral", "mixtral-8x7b"), "mistralai/Mixtral-8x7B-v0.1"),
    **dict.fromkeys(("mixtral-instruct", "mixtral-8x7b-instruct"), "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mistral-small-24b-base-2501": "mistralai/Mistral-Small-24B-Base-2501",
    **{f"tiny-stories-{size}": f"roneneldan/TinyStories-{name}" for size, name in _TINY_STORIES.items()},
    **{
        f"tiny-stories-instruct-{size}": f"roneneldan/TinyStories-Instruct-{name}"
        for size, name in _TINY_STORIES.items()
    },
    "tiny-stories-1l-21m": "roneneldan/TinyStories-1Layer-21M",
    "tiny-stories-instruct-1l-21m": "roneneldan/TinyStories-Instuct-1Layer-21M",  # the id is spelled so
    **{f"stablelm-{short}": f"stabilityai/stablelm-{name}" for short, name in _STABLELM.items()},
    **{f"stablelm-{name}": f"stabilityai/stablelm-{name}" for name in _STABLELM.values()},
    **{f"yi-{size.lower()}": f"01-ai/Yi-{size}" for size in ("6B", "34B", "6B-Chat", "34B-Chat")},
    "mgpt": "ai-forever/mGPT",
    "olmo-1b": "allenai/OLMo-1B-hf",
    "olmo-7b": "allenai/OLMo-7B-hf",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    **{f"olmo-{name.lower()}": f"allenai/Olmo-{name}" for name in _OLMO_3},
    **dict.fromkeys(("gpt-oss", "gpt-oss-20b"), "openai/gpt-oss-20b"),
    **dict.fromkeys(("apertus", "apertus-8b"), "swiss-ai/Apertus-8B-2509"),
    **dict.fromkeys(("apertus-instruct", "apertus-8b-instruct"), "swiss-ai/Apertus-8B-Instruct-2509"),
    **{
        f"bert-{size}-{case}": f"google-bert/bert-{size}-{case}"
        for size in ("base", "large")
        for case in ("cased", "uncased")
    },
    **{f"t5-{size}": f"google-t5/t5-{size}" for size in ("small", "base", "large")},
    **{short + end: f"NeelNanda/{name}" for short, name in _TOYS.items() for end in ("", "-new", "-c4-code")},
    **{f"solu-{n}l{end}": f"NeelNanda/SoLU_{n}L_v{v}_old" for n, v in _EARLY_SOLU.items() for end in ("-pile", "-old")},
    **{
        f"solu-{n}l{end}": f"NeelNanda/SoLU_{n}L512W_Wiki_Finetune"
        for n in (1, 4)
        for end in ("-wiki", "-wiki-finetune", "-finetune")
    },
    **dict.fromkeys(_TWO_LAYERS, "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"),
    "redwood_attn_2l": "ArthurConmy/redwood_attn_2l",
    "othello-gpt": "Baidicoot/Othello-GPT-Transformer-Lens",
}

# glob of hub ids -> pattern of revision names, and the saved steps
CHECKPOINTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "EleutherAI/pythia-*-v0": ("step{}", tuple(range(1000, 143_001, 1000))),
    "EleutherAI/pythia-*": ("step{}", (0, *(2**i for i in range(10)), *range(1000, 143_001, 1000))),
    "stanford-crfm/*": (
        "checkpoint-{}",
        (*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000)),
    ),
}
