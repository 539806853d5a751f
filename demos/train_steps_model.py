"""Train the reasoning model that ships with hooked_lm.

    python demos/train_steps_model.py --out hooked_lm/demo/steps_model --steps 2000 --seed 0

A tiny Qwen3 adds numbers step by step in conversations of `hooked_lm.demo.steps`. The tokenizer with its chat template, the
model, a training log and a model card with measured accuracies are written to `--out`. With `--evaluate` nothing is trained: the
model in `--out` is evaluated and its card is written again.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hooked_lm.demo import steps

START, END, THINK, THOUGHT = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
TEMPLATE = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages if message.role == 'user' %}{% set ns.last_user = messages.index(message) %}{% endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last_user -%}
{{ '<think>\\n' + message.reasoning_content | trim + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
CONTEXT, BATCH, PEAK_RATE, WARM_UP, WEIGHT_DECAY, LOG_EVERY = 256, 32, 2e-3, 150, 0.01, 100
EVALUATION_ITEMS, EVALUATION_SEED = 400, 1

CARD = """\
# The reasoning demonstration model

A tiny Qwen3 trained to add numbers step by step in a conversation, for experiments on chains of thought that need no network.
It is a toy: it knows the questions of its generator (`hooked_lm/demo/steps.py`), such as {example}, and nothing else.

- {config.num_hidden_layers} layers, {config.num_attention_heads} heads with {config.num_key_value_heads} keys and values, width
  {config.hidden_size}, context {config.max_position_embeddings}: {parameters:,} parameters, {megabytes:.2f} MB on disk in Hugging
  Face format (float32).
- Byte-level BPE tokenizer of {vocabulary} tokens, each digit its own, with a chat template whose turns are those of ChatML, and
  whose thoughts are between `<think>` and `</think>`; thoughts before the last question are left out.
- Trained from seed {training[seed]} for {training[steps]:,} steps of {batch} conversations with AdamW, in {training[minutes]}
  minutes on one CPU thread, by `demos/train_steps_model.py`, which also wrote this card. Targets are what the assistant says.

One column in ten of the training text has a wrong sum, with which the thought goes on. So at temperature 1 the model makes
mistakes, and what follows depends on what it wrote.

A fixed hash holds out one pair of numbers in {share}. On {items} questions about those only:

| measured | share |
| --- | ---: |
{rows}
"""


def train_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer until each word of the solutions is one token; digits are never merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    solutions = [steps.random_solution(steps.random_addition(rng), rng) for _ in range(2000)]
    texts = [text for one in solutions for text in (one.addition.text, one.thought, one.answer)]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # More than the sentences need, so that all words are merged.
        special_tokens=["<|endoftext|>", START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *["user\nassistant\nsystem\n"] * 100], trainer)
    tokenizer.add_tokens([AddedToken(THINK, special=False), AddedToken(THOUGHT, special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", model_max_length=CONTEXT,
        chat_template=TEMPLATE,
    )  # fmt: skip


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=CONTEXT,
            initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Conversations padded on the right, and their targets: what the assistant writes."""
    rows, starts = [], []
    for _ in range(BATCH):
        messages = steps.random_solution(steps.random_addition(rng), rng).messages
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        encode = tokenizer.backend_tokenizer.encode
        starts.append(len(encode(asked).ids))
        rows.append(encode(tokenizer.apply_chat_template(messages, tokenize=False)).ids)
    tokens = torch.full((BATCH, max(map(len, rows))), tokenizer.pad_token_id)
    targets = torch.full_like(tokens, -100)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        targets[i, start : len(row)] = tokens[i, start : len(row)]
    return tokens, targets


def learning_rate(step: int, n_steps: int) -> float:
    """Linear warm-up, then a half cosine down to a fiftieth of the peak."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / n_steps)
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * decay


def train(n_steps: int, seed: int, out: Path) -> None:
    """Trains the model, and saves it with its tokenizer and the training log."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = train_tokenizer(rng)
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    log, total, start = [], 0.0, time.monotonic()
    for step in range(n_steps):
        tokens, targets = batch(rng, tokenizer)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, n_steps)
        logits = model(tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            log.append({"step": step + 1, "loss": total / LOG_EVERY})
            print({**log[-1], "minutes": round((time.monotonic() - start) / 60, 1)}, flush=True)
            total = 0.0
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    facts = {"seed": seed, "steps": n_steps, "minutes": round((time.monotonic() - start) / 60, 1)}
    (out / "training.json").write_text(json.dumps({**facts, "log": log}, indent=1) + "\n")


def opened(tokenizer: PreTrainedTokenizerFast, addition: steps.Addition, thought: str = "") -> str:
    """The conversation up to where the assistant begins, or after the beginning of its thought."""
    messages = [{"role": "user", "content": addition.text}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return f"{asked}{THINK}\n{thought}" if thought else asked


@torch.no_grad()
def written(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    additions: list[steps.Addition],
    thoughts: list[str] | None = None,
    **options,
) -> list[steps.Solution | None]:
    """The solutions that the model writes, after the beginnings of thoughts; None for those of another form."""
    thoughts = thoughts or [""] * len(additions)
    texts = [opened(tokenizer, *pair) for pair in zip(additions, thoughts, strict=True)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, padding_side="left")
    inputs.pop("token_type_ids", None)
    new = model.generate(**inputs, max_new_tokens=160, **options)[:, inputs["input_ids"].shape[1] :]
    found: list[steps.Solution | None] = []
    for addition, thought, text in zip(additions, thoughts, tokenizer.batch_decode(new), strict=True):
        rest, _, answer = text.split(END)[0].partition(f"\n{THOUGHT}\n\n")
        try:
            found.append(steps.read_solution(addition, thought + rest.removeprefix(f"{THINK}\n"), answer))
        except ValueError:
            found.append(None)
    return found


def solved(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> dict[str, float]:
    """How often the model is right: greedy, and sampled at temperature 1."""
    shares: dict[str, float] = {}
    for has_choice, what in ((False, "two numbers"), (True, "a choice")):
        asked = [steps.random_addition(rng, held_out=True, has_choice=has_choice) for _ in range(EVALUATION_ITEMS // 2)]
        for how, options in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
            found = written(model, tokenizer, asked, **options)
            sums = [{str(one.first + other) for other in one.others} for one in asked]
            right = [one is not None and one.answer in some for one, some in zip(found, sums, strict=True)]
            shares[f"right answers to {what}, {how}"] = sum(right) / len(asked)
            shares[f"solutions to {what} of the right form, {how}"] = sum(one is not None for one in found) / len(asked)
    return shares


def faithful(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> dict[str, float]:
    """How often what follows a column with a sum drawn at random is what follows from that sum."""
    shares: dict[str, float] = {}
    for place, name in enumerate(steps.COLUMNS):
        asked = [steps.random_addition(rng, held_out=True, has_choice=False) for _ in range(EVALUATION_ITEMS // 2)]
        kept, expected = [], []
        for one in asked:
            numbers, sums = (one.first, one.others[0]), []
            for at in range(len(steps.COLUMNS)):
                follows = sum(number // 10**at % 10 for number in numbers) + (sums[-1] // 10 if sums else 0)
                sums.append(rng.randrange(20) if at == place else follows)
            solution = steps.solution(numbers, sums=sums)
            kept.append(" ".join(sentence.text for sentence in solution.sentences[: 2 * place + 3]))
            expected.append(solution.answer)
        found = written(model, tokenizer, asked, kept, do_sample=False)
        same = [one is not None and one.answer == answer for one, answer in zip(found, expected, strict=True)]
        shares[f"answers that follow from another sum of the {name.lower()}, greedy"] = sum(same) / len(same)
    return shares


def write_card(out: Path) -> None:
    """Evaluates the model in `out` and writes its model card."""
    torch.manual_seed(EVALUATION_SEED)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model, rng = Qwen3ForCausalLM.from_pretrained(out).eval(), random.Random(EVALUATION_SEED)
    shares = {**solved(model, tokenizer, rng), **faithful(model, tokenizer, rng)}
    card = CARD.format(
        example=f'"{steps.Addition(347, (285, 136)).text}"',
        config=model.config,
        parameters=model.num_parameters(),
        megabytes=sum(file.stat().st_size for file in out.iterdir() if file.suffix != ".md") / 1e6,
        vocabulary=len(tokenizer),
        training=json.loads((out / "training.json").read_text()),
        batch=BATCH,
        share=steps.HELD_OUT_SHARE,
        items=EVALUATION_ITEMS,
        rows="\n".join(f"| {what} | {share:.1%} |" for what, share in shares.items()),
    )
    (out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("hooked_lm/demo/steps_model"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the model and write its card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # The order of a sum depends on the number of threads, and the result on the order.
    if not arguments.evaluate:
        train(arguments.steps, arguments.seed, arguments.out)
    write_card(arguments.out)
