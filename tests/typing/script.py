"""A script as a user writes it: `mypy --strict` must accept it against the annotations of the package. A test runs both."""

from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import assert_type

from hooked_lm import (
    ActivationCache,
    HookedEncoder,
    HookedTransformer,
    HookPoint,
    Pairs,
    patching,
    pretrained,
    utils,
)
from hooked_lm.analysis import logit_lens, metrics


class MyModel(HookedTransformer):
    pass


def load() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def load_any(name: str) -> MyModel:
    assert_type(pretrained.from_pretrained(name), pretrained.PretrainedModel)
    assert_type(pretrained.from_pretrained(name, cls=HookedTransformer), HookedTransformer)
    assert_type(pretrained.from_pretrained_no_processing(name, cls=MyModel), MyModel)
    assert_type(HookedTransformer.from_pretrained_no_processing(name), HookedTransformer)
    return MyModel.from_pretrained(name)


def load_encoder(name: str) -> HookedEncoder:
    return HookedEncoder.from_pretrained(name)


def without_first_head(z: Tensor, hook: HookPoint) -> Tensor:
    z[:, :, 0] = 0
    return z


def top_cells(model: HookedTransformer, clean: str, corrupted: str, page: Path) -> list[float]:
    metric = metrics.logit_difference(" Mary", " John", model=model)
    swept = patching.sweep(model, corrupted, clean, metric=metric, sites="z", positions=None, heads="each")
    pairs = Pairs(clean, corrupted, " Mary", " John")
    assert torch.equal(patching.sweep(model, pairs[:1], sites="z", positions=None, heads="each").values, swept.values)
    swept.plot(title="Heads").write_html(page)
    best: Tensor = swept.mean.flatten().topk(3).values
    return [float(value) for value in best]


def main(folder: Path) -> str:
    model = load()
    clean, corrupted = (f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
    logits, cache = model.run_with_cache(clean)
    pattern: Tensor = cache["pattern", 0]
    resid: Tensor = cache[utils.get_act_name("resid_post", 1)]
    cache.save(folder / "cache.safetensors")
    kept = ActivationCache.load(folder / "cache.safetensors", model)
    edited: Tensor = model.run_with_hooks(clean, fwd_hooks=[("blocks.*.attn.hook_z", without_first_head)])
    with model.hooks(fwd_hooks=[(("z", 0), without_first_head)]), torch.no_grad():
        loss: Tensor = model(clean, return_type="loss")
    cells = top_cells(model, clean, corrupted, folder / "heads.html")
    lens = logit_lens(model, clean, positions=[-1])
    text = model.generate(clean, max_new_tokens=2, do_sample=False, verbose=False)
    shapes = f"{tuple(pattern.shape)} {tuple(resid.shape)} {len(kept)} {lens.tokens.shape} {model.cfg.n_layers}"
    changed = float((edited - logits).abs().max().detach())
    assert load_any("demo").cfg.n_layers == model.cfg.n_layers
    return f"{text!s} {shapes} {float(loss):.2f} {changed:.2f} {cells}"


if __name__ == "__main__":
    print(main(Path(".")))
