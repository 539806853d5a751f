"""Train the demonstration model that ships with hooked_lm.

    python demos/train_demo_model.py --out hooked_lm/demo/model --steps 5000 --seed 0

A four-layer GPT-2 is trained on the texts of `hooked_lm.demo.corpus` and on repeated random token sequences.
The tokenizer, the model, a training log and a model card with measured accuracies are written to `--out`.
With `--evaluate` nothing is trained: the model in `--out` is evaluated and its card is written again.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hooked_lm.demo import corpus

BOS = "<|endoftext|>"
CONTEXT = 128
SHORT, MIDDLE, LONG = (64, CONTEXT // 4), (32, CONTEXT // 2), (16, CONTEXT)
"""(windows, length) of a batch."""
PEAK_RATE, WARM_UP, WEIGHT_DECAY = 1e-3, 200, 0.01
LOG_EVERY = 250
EVALUATION_ITEMS, EVALUATION_SEED, PERIODS = 500, 1, (10, 20, 30, 40, 50, 60)

CARD = """\
# The demonstration model

A small GPT-2 trained on generated text, for interpretability experiments that need no network. It is a toy:
it knows the sentences of its generator (`hooked_lm/demo/corpus.py`) and nothing else.

- {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context {config.n_positions}:
  {parameters:,} parameters, {size:.2f} MB on disk in Hugging Face format (float32).
- Byte-level BPE tokenizer of {vocabulary} tokens. Names, cities, countries, days, months, pronouns
  and two-digit years are single tokens; a year such as " 1732" is the two tokens " 17" and "32".
- Trained from seed {training[seed]} for {training[steps]:,} steps of 2,048 tokens with AdamW, in
  {training[minutes]} minutes on one CPU thread, by `demos/train_demo_model.py`, which also wrote this card.

Every training window begins with `<|endoftext|>`, and so should every prompt. The tokenizer does not add it.

## Data

Half of the training windows are texts of the generator, separated by spaces or newlines. The other half are
repeated random token sequences, whose first copy is not trained on.

A fixed hash holds out one combination in {share}. The model is evaluated on these only:

{held_out}

## Evaluation

On {items} held-out items for each task (drawn with seed {seed}; small tasks repeat items, hence the column of
distinct prompts). The input is `<|endoftext|>` and the prompt. Accuracy is that of the most likely token of
the whole vocabulary; for `greater_than` the most likely token must be a greater year, and greater
years must hold more than half of the probability. The logit difference is to a foil, such as the other name.

| task | accuracy | mean logit difference | distinct prompts | example |
| --- | ---: | ---: | ---: | --- |
{tasks}

On 50 sequences of random tokens, each repeated once: the accuracy on the second copy (without its first
token, which is unpredictable), and the heads (`layer.head`) with the highest mean attention from the second copy to the
token after the previous occurrence (induction), and from all positions to the previous token.

| sequence length | accuracy | best induction head | best previous-token head |
| ---: | ---: | --- | --- |
{repeats}
"""


def train_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer until each word and two-digit year of the corpus is one token."""
    tokenizer = Tokenizer(models.BPE())
    # Without the first split, BPE could split " 1732" into " 1" + "73" + "2".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [*corpus.NAMES, *corpus.CITIES, *corpus.CAPITALS, *corpus.WORDS, *corpus.DAYS, *corpus.MONTHS]
    texts = [corpus.training_text(rng) for _ in range(20_000)] + [f" {word}" for word in words] + corpus.YEARS
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # More than the corpus needs, so that all its words are merged.
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, unk_token=BOS, model_max_length=CONTEXT
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=4,
            n_head=8,
            activation_function="gelu_new",
            initializer_range=0.05,  # GPT-2's 0.02, scaled up for the smaller width.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def text_window(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int) -> list[int]:
    """BOS and as many training texts as fit, each on a new line or after a space."""
    encode = tokenizer.backend_tokenizer.encode
    tokens = [tokenizer.bos_token_id, *encode(corpus.training_text(rng)).ids]
    while len(tokens) < length:
        text = corpus.training_text(rng)
        tokens += encode(rng.choice(("\n" + text, " " + text.lstrip()))).ids
    return tokens[:length]


def repeated_window(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int) -> tuple[list[int], int]:
    """BOS, a random prefix and a repeated random sequence; and the first predictable position."""
    period = rng.randint(5, (length - 4) // 2)
    prefix = rng.randint(0, min(10, length - 2 * period - 2))
    tokens = [tokenizer.bos_token_id, *random_tokens(rng, tokenizer, prefix)]
    sequence = random_tokens(rng, tokenizer, period)
    tokens += sequence * math.ceil(length / period)
    return tokens[:length], 1 + prefix + period + 1


def random_tokens(rng: random.Random, tokenizer: PreTrainedTokenizerFast, n: int) -> list[int]:
    """Tokens drawn uniformly, with replacement, from the vocabulary without the special token."""
    # The special token is the first, so the others are a range.
    return rng.choices(range(tokenizer.bos_token_id + 1, len(tokenizer)), k=n)


def batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, windows: int, length: int):
    """Tokens and targets, half text and half repeated sequences; unpredictable tokens are not targets."""
    tokens = torch.empty(windows, length, dtype=torch.long)
    targets = torch.empty_like(tokens)
    for row in range(windows):
        if row % 2:
            window, first = repeated_window(rng, tokenizer, length)
        else:
            window, first = text_window(rng, tokenizer, length), 1
        tokens[row] = targets[row] = torch.tensor(window)
        targets[row, :first] = -100
    return tokens, targets


def shape(progress: float) -> tuple[int, int]:
    """The number and length of windows in a batch; short windows come first, because they teach attention sooner."""
    return SHORT if progress < 0.2 else MIDDLE if progress < 0.5 else LONG


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to a fiftieth of the peak."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / steps)
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * decay


def train(steps: int, seed: int, out: Path) -> None:
    """Trains tokenizer and model, and saves both with the training log."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = train_tokenizer(rng)
    model = new_model(tokenizer)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    log, sums = [], torch.zeros(2)
    start = time.monotonic()
    for step in range(steps):
        tokens, targets = batch(rng, tokenizer, *shape(step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits = model(tokens).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
        losses, kept = losses.view_as(targets[:, 1:]), targets[:, 1:] != -100
        optimizer.zero_grad()
        (losses.sum() / kept.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        text_loss, repeated_loss = (losses[half::2].sum() / kept[half::2].sum() for half in (0, 1))
        sums += torch.stack([text_loss, repeated_loss]).detach()
        if (step + 1) % LOG_EVERY == 0:
            text_mean, repeated_mean = (sums / LOG_EVERY).tolist()
            log.append({"step": step + 1, "text_loss": text_mean, "repeated_loss": repeated_mean})
            print({**log[-1], "minutes": round((time.monotonic() - start) / 60, 1)}, flush=True)
            sums.zero_()
        if (step + 1) % 1000 == 0 or step + 1 == steps:
            tokenizer.save_pretrained(out)
            model.save_pretrained(out)
            facts = {"seed": seed, "steps": step + 1, "minutes": round((time.monotonic() - start) / 60, 1)}
            (out / "training.json").write_text(json.dumps({**facts, "log": log}, indent=1) + "\n")


@torch.no_grad()
def last_logits(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> torch.Tensor:
    """The next-token logits after each prompt, each run separately after BOS: [prompt, vocabulary]."""
    rows = [[tokenizer.bos_token_id, *tokenizer.encode(prompt)] for prompt in prompts]
    ends = [len(row) - 1 for row in rows]
    # Attention is causal, so padding on the right does not affect the prompt.
    tokens = torch.tensor([row + [tokenizer.eos_token_id] * (max(ends) + 1 - len(row)) for row in rows])
    return model(tokens).logits[range(len(rows)), ends]


def evaluate_task(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[random.Random], corpus.Example],
    seed: int,
) -> dict:
    """Accuracy of the most likely next token on held-out items, and the mean logit difference to the foil.

    For `greater_than` an item is correct if the most likely token is a greater year and greater years have more
    than half of the probability.
    """
    rng = random.Random(seed)
    examples = [draw(rng) for _ in range(EVALUATION_ITEMS)]
    logits = last_logits(model, tokenizer, [example.prompt for example in examples])
    answers, foils = (
        torch.tensor([tokenizer.encode(getattr(example, field)) for example in examples])
        for field in ("answer", "wrong_answer")
    )
    correct = logits.argmax(-1, keepdim=True) == answers
    if examples[0].task == "greater_than":
        for row, example in enumerate(examples):
            greater = tokenizer.convert_tokens_to_ids(corpus.greater_years(example))
            mass = logits[row].softmax(-1)[greater].sum()
            correct[row] = logits[row].argmax().item() in greater and mass > 0.5
    return {
        "shortest": min(examples, key=lambda example: len(example.prompt)),
        "distinct": len({example.prompt for example in examples}),
        "accuracy": correct.float().mean().item(),
        "logit_difference": (logits.gather(1, answers) - logits.gather(1, foils)).mean().item(),
    }


@torch.no_grad()
def evaluate_repeats(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, period: int, seed: int
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Accuracy and head scores on random token sequences that are repeated once after BOS.

    Returns the accuracy on the second copy (without its first token, which is unpredictable), and two scores of
    each head, [layer, head]: the mean attention from the second copy to the token after the previous occurrence
    (induction), and from all positions to the previous token.
    """
    rng = random.Random(seed)
    sequences = [random_tokens(rng, tokenizer, period) for _ in range(50)]
    tokens = torch.tensor([[tokenizer.bos_token_id, *sequence, *sequence] for sequence in sequences])
    output = model(tokens, output_attentions=True)
    predicted = output.logits[:, period + 1 : -1].argmax(-1)
    accuracy = (predicted == tokens[:, period + 2 :]).float().mean().item()
    patterns = torch.stack(output.attentions)
    induction = patterns.diagonal(1 - period, -2, -1)[..., -period:].mean((1, -1))
    previous = patterns.diagonal(-1, -2, -1).mean((1, -1))
    return accuracy, induction, previous


def write_card(out: Path) -> None:
    """Evaluates the model in `out` and writes its model card."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = GPT2LMHeadModel.from_pretrained(out, attn_implementation="eager").eval()
    training = json.loads((out / "training.json").read_text())
    results = {task: evaluate_task(model, tokenizer, draw, EVALUATION_SEED) for task, draw in corpus.TASKS.items()}
    task_rows = [
        f"| {task} | {result['accuracy']:.1%} | {result['logit_difference']:.1f} | {result['distinct']} "
        f"| `{result['shortest'].prompt}` → `{result['shortest'].answer}` |"
        for task, result in results.items()
    ]
    repeats = {period: evaluate_repeats(model, tokenizer, period, EVALUATION_SEED) for period in PERIODS}
    repeat_rows = [
        f"| {period} | {accuracy:.1%} | {best_head(induction)} | {best_head(previous)} |"
        for period, (accuracy, induction, previous) in repeats.items()
    ]
    card = CARD.format(
        parameters=model.num_parameters(),
        vocabulary=len(tokenizer),
        config=model.config,
        size=sum(file.stat().st_size for file in out.iterdir() if file.suffix != ".md") / 1e6,
        training=training,
        share=corpus.HELD_OUT_SHARE,
        held_out=corpus.HELD_OUT.strip(),
        items=EVALUATION_ITEMS,
        seed=EVALUATION_SEED,
        tasks="\n".join(task_rows),
        repeats="\n".join(repeat_rows),
    )
    (out / "README.md").write_text(card)
    print(card)


def best_head(scores: torch.Tensor) -> str:
    """The head with the highest score, as `layer.head (score)`."""
    layer, head = divmod(scores.argmax().item(), scores.shape[1])
    return f"{layer}.{head} ({scores.max():.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("hooked_lm/demo/model"))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the model and write its card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # The order of a sum depends on the number of threads, and the result on the order.
    if not arguments.evaluate:
        train(arguments.steps, arguments.seed, arguments.out)
    write_card(arguments.out)
