"""Train the vision-language model that ships with hooked_lm.

    python demos/train_shapes_model.py --out hooked_lm/demo/shapes_model --steps 3000 --seed 0

A tiny LLaVA answers questions about the pictures of `hooked_lm.demo.shapes`. The tokenizer, the model, a training log and a
model card with measured accuracies are written to `--out`. With `--evaluate` nothing is trained: the model in `--out` is
evaluated and its card is written again.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from hooked_lm.demo import shapes

BATCH, PEAK_RATE, WARM_UP, WEIGHT_DECAY, LOG_EVERY = 48, 2e-3, 150, 0.01, 100
EVALUATION_ITEMS, EVALUATION_SEED = 1000, 1
N_TOKENS = (shapes.SIZE // shapes.PATCH) ** 2  # of a picture

CARD = """\
# The vision-language demonstration model

A tiny LLaVA trained on generated pictures of shapes, for interpretability experiments on images that need no network. It is a
toy: it answers the questions of its generator (`hooked_lm/demo/shapes.py`) and nothing else.

- Tower: {vision.num_hidden_layers} layers, {vision.num_attention_heads} heads, width {vision.hidden_size}; pictures of
  {size} x {size} pixels, {patches} patches. Decoder: {text.num_hidden_layers} layers, {text.num_attention_heads} heads, width
  {text.hidden_size}. {parameters:,} parameters, {megabytes:.2f} MB on disk in Hugging Face format (float32).
- {vocabulary} words, each one token. A picture is {patches} tokens.
- Trained from seed {training[seed]} for {training[steps]:,} steps of {batch} questions with AdamW, in
  {training[minutes]} minutes on one CPU thread, by `demos/train_shapes_model.py`, which also wrote this card.

A fixed hash holds out one picture in {share}; the model is evaluated on {items} questions about those only:

| question | accuracy | by chance |
| --- | ---: | ---: |
{rows}
"""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(shapes.VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, additional_special_tokens=[shapes.IMAGE], padding_side="left"
    )


def new_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """What reads pictures of any size: they are resized to the tower's pixels and scaled to -1 to 1."""
    size = {"height": shapes.SIZE, "width": shapes.SIZE}
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = CLIPImageProcessorPil(size=size, do_center_crop=False, **scale)
    return LlavaProcessor(images, tokenizer, shapes.PATCH, "default", num_additional_image_tokens=1)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, projection_dim=48,
        image_size=shapes.SIZE, patch_size=shapes.PATCH, initializer_range=0.1,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.08, tie_word_embeddings=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(shapes.IMAGE),
        image_seq_length=N_TOKENS,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def batch(questions: list[shapes.Question], tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Tensor], Tensor]:
    """The prompts with their pictures, padded on the left, and the answers."""
    image = " ".join([shapes.IMAGE] * N_TOKENS)
    texts = [f"<s> {question.text}".replace(shapes.IMAGE, image) for question in questions]
    inputs = dict(
        tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    )
    inputs["pixel_values"] = torch.stack([shapes.pixels(question.picture) for question in questions])
    return inputs, torch.tensor(tokenizer.convert_tokens_to_ids([question.answer for question in questions]))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to a fiftieth of the peak."""
    decay = 0.51 + 0.49 * math.cos(math.pi * step / steps)
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * decay


def train(steps: int, seed: int, out: Path) -> None:
    """Trains the model, and saves it with its tokenizer and the training log."""
    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), new_tokenizer()
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    log, sums, start = [], torch.zeros(2), time.monotonic()
    for step in range(steps):
        inputs, answers = batch([shapes.random_question(rng) for _ in range(BATCH)], tokenizer)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        logits = model(**inputs, logits_to_keep=1).logits[:, -1]
        loss = cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), (logits.argmax(-1) == answers).float().mean()])
        if (step + 1) % LOG_EVERY == 0:
            mean_loss, accuracy = (sums / LOG_EVERY).tolist()
            log.append({"step": step + 1, "loss": mean_loss, "accuracy": accuracy})
            print({**log[-1], "minutes": round((time.monotonic() - start) / 60, 1)}, flush=True)
            sums.zero_()
    new_processor(tokenizer).save_pretrained(out)
    model.save_pretrained(out)
    facts = {"seed": seed, "steps": steps, "minutes": round((time.monotonic() - start) / 60, 1)}
    (out / "training.json").write_text(json.dumps({**facts, "log": log}, indent=1) + "\n")


@torch.no_grad()
def accuracies(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> dict[bool, float]:
    """The share of right answers about held-out pictures: to questions for colours, and to those for kinds."""
    rng = random.Random(EVALUATION_SEED)
    questions = [shapes.random_question(rng, held_out=True) for _ in range(EVALUATION_ITEMS)]
    inputs, answers = batch(questions, tokenizer)
    right = model(**inputs, logits_to_keep=1).logits[:, -1].argmax(-1) == answers
    colours = torch.tensor([question.asks_colour for question in questions])
    return {asks_colour: right[colours == asks_colour].float().mean().item() for asks_colour in (True, False)}


def write_card(out: Path) -> None:
    """Evaluates the model in `out` and writes its model card."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    model = LlavaForConditionalGeneration.from_pretrained(out).eval()
    found = accuracies(model, tokenizer)
    rows = [
        f"| what colour is the shape in ... | {found[True]:.1%} | {1 / len(shapes.COLOURS):.0%} |",
        f"| which shape is in ... | {found[False]:.1%} | {1 / len(shapes.SHAPES):.0%} |",
    ]
    card = CARD.format(
        vision=model.config.vision_config,
        text=model.config.text_config,
        size=shapes.SIZE,
        patches=N_TOKENS,
        parameters=model.num_parameters(),
        megabytes=sum(file.stat().st_size for file in out.iterdir() if file.suffix != ".md") / 1e6,
        vocabulary=len(tokenizer),
        training=json.loads((out / "training.json").read_text()),
        batch=BATCH,
        share=shapes.HELD_OUT_SHARE,
        items=EVALUATION_ITEMS,
        rows="\n".join(rows),
    )
    (out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("hooked_lm/demo/shapes_model"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the model and write its card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # The order of a sum depends on the number of threads, and the result on the order.
    if not arguments.evaluate:
        train(arguments.steps, arguments.seed, arguments.out)
    write_card(arguments.out)
