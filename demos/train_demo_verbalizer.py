"""Train the verbalizer that ships with hooked_lm: a LoRA under which the demonstration model says what it reads in a vector.

    python demos/train_demo_verbalizer.py --out hooked_lm/demo/verbalizer --steps 600 --seed 0

The vectors are the residual stream after layer 1 of the demonstration model, at the last token of texts of its generator. What
they are asked for is in the prompt: a country, a city, a name, the gender of a person, a day. Only the adapter is
trained. It is measured on held-out texts, whose combinations of words are in no training text, beside four controls: no
vector, shuffled coordinates, a random direction, and vectors of the model's untrained twin at the same place.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from hooked_lm import HookedTransformer
from hooked_lm.analysis import verbalize
from hooked_lm.demo import verbalizer
from hooked_lm.hub import LoRA
from hooked_lm.models.twins import twin_of


def vectors_of(model: HookedTransformer, texts: Sequence[str]) -> torch.Tensor:
    """The residual stream after the layer that is read, at the last token of each text, [text, d_model]."""
    found = []
    with torch.no_grad():
        for text in texts:
            cache = model.run_with_cache(text, names_filter=verbalizer.SITE, return_type=None)[1]
            found.append(cache[verbalizer.SITE][0, -1])
    return torch.stack(found)


def train(model: HookedTransformer, steps: int, seed: int, rate: float = 3e-3, batch: int = 64) -> LoRA:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    items = [verbalizer.item(rng, held_out=False) for _ in range(4000)]
    vectors = vectors_of(model, [item.text for item in items])
    lora = LoRA.new(model, rank=4, seed=seed)
    optimizer = torch.optim.AdamW(lora.parameters(), lr=rate, weight_decay=0.0)
    by_question = {name: [i for i, item in enumerate(items) if item.question == name] for name in verbalizer.QUESTIONS}
    prompts = {name: model.to_tokens(text) for name, text in verbalizer.QUESTIONS.items()}
    slots = {name: model.to_str_tokens(text).index(verbalizer.SLOT) for name, text in verbalizer.QUESTIONS.items()}
    norms = {}
    with torch.no_grad():
        for name, tokens in prompts.items():
            values = model.run_with_cache(tokens, names_filter="hook_embed", return_type=None)[1]["hook_embed"][0]
            others = [i for i in range(1, len(values)) if i != slots[name]]
            norms[name] = values[others].norm(dim=1).median()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, (steps - step) / (steps / 3))
        name = rng.choice(list(prompts))
        rows = [by_question[name][int(i)] for i in torch.randint(len(by_question[name]), (batch,), generator=generator)]
        put = vectors[rows] / vectors[rows].norm(dim=1, keepdim=True) * norms[name]
        answers = torch.tensor([model.to_single_token(items[row].answer) for row in rows])

        def hook(value: torch.Tensor, hook: object, put: torch.Tensor = put, slot: int = slots[name]) -> torch.Tensor:
            return torch.cat([value[:, :slot], put[:, None], value[:, slot + 1 :]], 1)

        with model.with_adapter(lora), model.hooks([("hook_embed", hook)]):
            logits = model(prompts[name].expand(batch, -1))[:, -1]
        loss = cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward(inputs=lora.parameters())
        optimizer.step()
        if step % 100 == 0 or step + 1 == steps:
            print(step, round(loss.item(), 4), flush=True)
    return lora


def measure(model: HookedTransformer, lora: LoRA | None, n: int = 100, seed: int = 1) -> dict[str, dict[str, float]]:
    """The accuracy on held-out texts by question: of the vectors, of the controls, and of vectors of the untrained twin."""
    twin, found = twin_of(model), {}
    for name, prompt in verbalizer.QUESTIONS.items():
        rng = random.Random(seed)
        items = [verbalizer.item(rng, held_out=True, question=name) for _ in range(n)]
        texts, answers = [item.text for item in items], [item.answer for item in items]
        options = {"answers": answers, "adapter": lora, "max_new_tokens": 1}
        own = verbalize(model, vectors_of(model, texts), prompt, verbalizer.SLOT, **options)
        other = verbalize(model, vectors_of(twin, texts), prompt, verbalizer.SLOT, **options, control=None)
        found[name] = dict(zip(own.reads, own.accuracy.mean.tolist(), strict=True))
        found[name]["untrained twin"] = other.accuracy.mean.item()
        found[name]["chance"] = max(answers.count(one) for one in set(answers)) / n
    return found


def probed(model: HookedTransformer, question: str = "name", n: int = 1500, n_held_out: int = 300) -> list[float]:
    """What there is to read: the accuracy of a linear probe on held-out texts, in the stream after each layer."""
    rng, parts = random.Random(2), []
    for held_out, size in ((False, n), (True, n_held_out)):
        items = [verbalizer.item(rng, held_out, question) for _ in range(size)]
        labels = torch.tensor([model.to_single_token(item.answer) for item in items])
        with torch.no_grad():
            caches = [model.run_with_cache(item.text, names_filter="blocks.*.hook_resid_post")[1] for item in items]
            streams = [cache.stack_activation("resid_post")[:, 0, -1] for cache in caches]
        parts.append((torch.stack(streams, 1), labels))
    (train, wanted), (rest, right) = parts
    found = []
    for known, unknown in zip(train, rest, strict=True):
        mean, deviation = known.mean(0), known.std(0)
        probe = torch.nn.Linear(model.cfg.d_model, model.cfg.d_vocab)
        optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=1e-2)
        for _ in range(300):
            optimizer.zero_grad()
            cross_entropy(probe((known - mean) / deviation), wanted).backward()
            optimizer.step()
        found.append((probe((unknown - mean) / deviation).argmax(1) == right).float().mean().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = HookedTransformer.from_pretrained_no_processing("demo", device="cpu")
    start = time.time()
    lora = train(model, arguments.steps, arguments.seed)
    lora.save(arguments.out)
    facts = {"seed": arguments.seed, "steps": arguments.steps, "minutes": round((time.time() - start) / 60, 1)}
    facts |= {"accuracy": measure(model, lora), "accuracy without the adapter": measure(model, None)}
    facts |= {"accuracy of a linear probe of the name, by layer": probed(model)}
    (arguments.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
