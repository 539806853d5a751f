"""Train the model with few weights that ships with hooked_lm.

    python demos/train_sparse_model.py --out hooked_lm/demo/sparse_model --steps 3000 --seed 0

A tiny transformer without norms learns the statements of `hooked_lm.planted.trained`. After each step all but the largest
entries of each weight matrix are set to 0 (Gao et al. 2025, arXiv:2511.13653); the share that is left falls from 1 to its final
value in the first part of training. The model with its tokenizer, a training log and a model card with measured accuracies are
written to `--out`. With `--evaluate` nothing is trained: the model in `--out` is evaluated and its card is written again.
"""

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.planted.trained import CLOSES, N_CTX, USES, VOCABULARY, random_tokens

BATCH, PEAK_RATE, WARM_UP, LOG_EVERY = 48, 3e-3, 100, 300
SHARE, SPARSE_FROM = 0.05, 0.6  # the share of the entries that are left at last, and of the steps after which
EVALUATION_TEXTS, EVALUATION_SEED = 1000, 1
IDS = {token: i for i, token in enumerate(VOCABULARY)}

CARD = """\
# The demonstration model with few weights

A tiny transformer of which all but a few weights are 0, trained on generated statements, for experiments on circuits that can be
read off the weights (Gao et al. 2025, arXiv:2511.13653). It is a toy: it knows statements such as `x = ( a b ) ; x . ;`
(`hooked_lm/planted/trained.py`), and nothing else.

- {cfg.n_layers} layers, {cfg.n_heads} heads, width {cfg.d_model}, {cfg.d_mlp} neurons a layer, context {cfg.n_ctx}, no norms:
  {weights:,} entries of weight matrices, of which {nonzero:,} ({share:.1%}) are not 0; {megabytes:.2f} MB on disk (float32).
- {vocabulary} tokens, divided by spaces.
- Trained from seed {training[seed]} for {training[steps]:,} steps of {batch} texts with Adam, in {training[minutes]} minutes on
  one CPU thread, by `demos/train_sparse_model.py`, which also wrote this card.

Measured on {texts} new texts, as shares of the tokens of a kind that have the highest logit among the tokens of that kind:

| token | accuracy | by chance |
| --- | ---: | ---: |
{rows}
"""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="^"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="^", eos_token="^", unk_token="^", pad_token="^", model_max_length=N_CTX
    )


def new_model(seed: int) -> HookedTransformer:
    cfg = HookedTransformerConfig(
        n_layers=2,
        d_model=48,
        n_heads=4,
        d_head=12,
        d_mlp=96,
        n_ctx=N_CTX,
        d_vocab=len(VOCABULARY),
        act_fn="relu",
        normalization_type=None,
        initializer_range=0.08,
        device="cpu",
        seed=seed,
    )
    return HookedTransformer(cfg, new_tokenizer())


def batch(rng: Random, n: int = BATCH) -> Tensor:
    return torch.tensor([[IDS[token] for token in random_tokens(rng)] for _ in range(n)])


def matrices(model: HookedTransformer) -> list[Tensor]:
    """The weights that become sparse: all but the biases."""
    return [weight for name, weight in model.named_parameters() if ".W_" in name]


@torch.no_grad()
def make_sparse(model: HookedTransformer, progress: float) -> None:
    """Keep the largest entries of each matrix; `progress` is the share of the steps that are done."""
    for weight in matrices(model):
        kept = max(1, round(weight.numel() * max(SHARE, SHARE ** (progress / SPARSE_FROM))))
        threshold = weight.abs().flatten().kthvalue(weight.numel() - kept + 1).values
        weight *= weight.abs() >= threshold


def train(n_steps: int, seed: int, out: Path) -> None:
    """Trains the model, and saves it with the training log."""
    model, rng = new_model(seed), Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    log, total, start = [], 0.0, time.monotonic()
    for step in range(n_steps):
        tokens = batch(rng)
        decay = 0.51 + 0.49 * math.cos(math.pi * step / n_steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * decay
        loss = cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        make_sparse(model, step / n_steps)
        total += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            log.append({"step": step + 1, "loss": total / LOG_EVERY})
            print({**log[-1], "minutes": round((time.monotonic() - start) / 60, 1)}, flush=True)
            total = 0.0
    model.save(out)
    facts = {"seed": seed, "steps": n_steps, "minutes": round((time.monotonic() - start) / 60, 1)}
    (out / "training.json").write_text(json.dumps({**facts, "log": log}, indent=1) + "\n")


@torch.no_grad()
def accuracies(model: HookedTransformer) -> dict[str, tuple[float, int]]:
    """For tokens that close, and those that follow a name that is used: the accuracy, and among how many kinds."""
    tokens = batch(Random(EVALUATION_SEED), EVALUATION_TEXTS)
    before, targets, logits = tokens[:, :-1], tokens[:, 1:], model(tokens)[:, :-1]
    found = {}
    for what, kinds in (("closes a value", {*CLOSES.values()}), ("follows a used name", {*USES.values()})):
        ids = torch.tensor(sorted(IDS[kind] for kind in kinds))
        is_asked = torch.isin(targets, ids) & (before != IDS["="])  # a quote after = opens
        best = ids[logits[..., ids].argmax(-1)]
        found[what] = float((best == targets)[is_asked].double().mean()), len(ids)
    return found


def write_card(out: Path) -> None:
    """Evaluates the model in `out` and writes its model card."""
    model = HookedTransformer.from_pretrained_no_processing(out)
    weights = matrices(model)
    n, nonzero = sum(weight.numel() for weight in weights), sum(int((weight != 0).sum()) for weight in weights)
    card = CARD.format(
        cfg=model.cfg,
        weights=n,
        nonzero=nonzero,
        share=nonzero / n,
        megabytes=sum(file.stat().st_size for file in out.iterdir() if file.suffix != ".md") / 1e6,
        vocabulary=len(VOCABULARY),
        training=json.loads((out / "training.json").read_text()),
        batch=BATCH,
        texts=EVALUATION_TEXTS,
        rows="\n".join(f"| {what} | {share:.1%} | {1 / k:.0%} |" for what, (share, k) in accuracies(model).items()),
    )
    (out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("hooked_lm/demo/sparse_model"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the model and write its card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # The order of a sum depends on the number of threads, and the result on the order.
    if not arguments.evaluate:
        train(arguments.steps, arguments.seed, arguments.out)
    write_card(arguments.out)
