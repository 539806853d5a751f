"""Chat templates with the structure of those of known families, in words of our own, and small tokenizers for them."""

import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The date and the text about the knowledge of the model are the template's; contents are stripped.
LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nKnowledge until: December 2023\\n' }}
{{- 'Today: ' + (date_string or '26 Jul 2024') + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# No role for the system, whose text begins the last turn of the user; turns must alternate.
MISTRAL = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for m in loop_messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user, assistant') }}{%- endif %}
{%- if m.role == 'user' %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}
{%- endfor %}"""

# The text of the system begins the first turn of the user; the assistant is "model"; contents are stripped.
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}{%- endif %}
{%- if m.role == 'assistant' %}{%- set role = 'model' %}{%- else %}{%- set role = m.role %}{%- endif %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""

# Thoughts of turns before the last question are left out, and those of the last answer always written, also if empty.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nFunctions that can be called:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nA call is an object in <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(looking=true, last_question=messages | length - 1) %}
{%- for m in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.looking and m.role == 'user'
    and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.looking = false %}{%- set ns.last_question = index %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_question and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

# Whatever an answer has before "</think>" is left out; the model starts within a thought.
DEEPSEEK_R1 = """{%- set ns = namespace(system='') %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

# Channels: a system text of the template's own, the given one is the developer's; thoughts of the last answer or with a call.
HARMONY = """{{- '<|start|>system<|message|>You are a language model.\\n' }}
{{- 'Current date: ' + (date or '2025-08-05') + '\\n\\nReasoning: ' }}
{{- (reasoning_effort or 'medium') + '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}{%- set rest = messages[1:] %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set last = namespace(call='') %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- if m.content and '<|channel|>analysis<|message|>' in m.content %}
{{- raise_exception('give thoughts as "thinking", not as channels in the content') }}{%- endif %}
{%- if m.tool_calls %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- set call = m.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '<|call|>' }}
{%- set last.call = call.name %}
{%- else %}
{%- if loop.last and not add_generation_prompt and m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

GENERATION = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n' }}
{%- generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# Calls as tags, an argument on lines of its own.
XML_CALLS = """{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Calls as a list of Python calls, results as JSON.
PYTHON_CALLS = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'tool' %}{{- {'output': m.content} | tojson }}{%- else %}{{- m.content or '' }}{%- endif %}
{%- if m.tool_calls %}{{- '[' }}{%- for call in m.tool_calls %}{%- set call = call.function or call %}
{{- call.name + '(' }}{%- for name, value in call.arguments | items %}{{- name + '=' + value | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
{{- ']' }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen3": QWEN3, "deepseek_r1": DEEPSEEK_R1,
    "harmony": HARMONY, "generation": GENERATION, "xml_calls": XML_CALLS, "python_calls": PYTHON_CALLS,
}  # fmt: skip
SPECIAL = re.findall(
    r"\S+",
    """
    <s> </s> <unk> <pad> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST]
    <start_of_turn> <end_of_turn> <|User|> <|Assistant|> <|end_of_sentence|> <|start|> <|end|> <|message|> <|channel|>
    <|call|> <|return|> <|assistant|> <|user|> <|system|>
    """,
)
# Words of their own, which are no special tokens in Qwen's tokenizer.
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEXT = [
    "You are a helpful assistant. What is 2 + 3? The user asks, and the answer is five.\n\nuser model assistant system tool",
    "The weather in Paris is sunny; add the numbers. One, two, three: hello, world! system: user: assistant: Be kind and short.",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """BPE with bytes for characters that it does not know, and a mark for spaces, as Llama 2, Mistral and Gemma have it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    return _trained(tokenizer, trainer)


def metaspace() -> PreTrainedTokenizerFast:
    """Unigram pieces that begin with a mark for a space, also at the beginning of the text, as T5 has them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = sorted(set("".join(TEXT)))
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer)


def word_level() -> PreTrainedTokenizerFast:
    """Words and punctuation; spaces are between tokens, and belong to none."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(tokenizer, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))


def _trained(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return made


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "metaspace": metaspace, "word_level": word_level,
}  # fmt: skip


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn, after one of the system if it is given."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call of a function."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
