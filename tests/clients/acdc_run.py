"""What automatic circuit discovery by cutting edges (Conmy et al. 2023, arXiv:2304.14997) asks of a model: called here, and by
itself with the original.

A small search in the manner of its published code, written anew: senders keep what passes them in this run, receivers are given
the corrupted stream plus what the senders of open edges changed. It leans on hooks added by hand and never taken away one by
one, on their order, on handles that lead to PyTorch-like dictionaries, on flags of the config, on caches of everything.

`python acdc_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes what `everything`
finds to OUT.
"""

import copy
import json
import sys
import zlib
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_ctx": 12, "d_head": 4, "n_heads": 4, "d_vocab": 20, "device": "cpu", "seed": 0,
    "init_weights": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "attn_only": dict(SIZES, attn_only=True, normalization_type="LNPre"),
    "gpt2": dict(SIZES, d_mlp=32, act_fn="gelu_new", normalization_type="LN"),
    "bare": dict(SIZES, d_mlp=32, act_fn="relu", normalization_type=None),
    "shortformer": dict(SIZES, attn_only=True, normalization_type="LN", positional_embedding_type="shortformer"),
}
CLEAN = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(1))
CORRUPTED = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(2))
Edge = tuple[str, int | None, str, int | None]  # receiver and sender, each a site and perhaps a head


def made(name: str) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    model = HookedTransformer(HookedTransformerConfig.from_dict(dict(MODELS[name])))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            noise = 0.4 * torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + noise if "ln" in key and key.endswith(".w") else noise)
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    if not model.cfg.attn_only and "use_hook_mlp_in" in model.cfg.to_dict():
        model.set_use_hook_mlp_in(True)
    return model


def at(head: int | None) -> Any:
    return slice(None) if head is None else (slice(None), slice(None), head)


class Search:
    """A graph of edges, last receivers first, and the hooks that run it."""

    def __init__(self, model: Any, threshold: float) -> None:
        model.reset_hooks()
        assert all(len(point.fwd_hooks) == 0 for point in model.hook_dict.values())
        assert model.cfg.use_attn_result
        assert model.cfg.use_split_qkv_input
        self.model, self.threshold = model, threshold
        self.order = self.order_of_sites()
        self.edges = self.all_edges()
        self.open = dict.fromkeys(self.edges, True)
        self.online: dict[str, Tensor] = OrderedDict()
        self.corrupted: dict[str, Tensor] = OrderedDict()
        model.cache_all(self.corrupted)
        model(CORRUPTED)
        model.reset_hooks()
        self.clean = model(CLEAN)

    def order_of_sites(self) -> list[str]:
        cache: dict[str, Tensor] = OrderedDict()
        self.model.cache_all(cache)
        self.model(torch.arange(min(10, self.model.cfg.d_vocab)).unsqueeze(0))
        self.model.reset_hooks()
        return [site for site in cache if not site.startswith("unembed.")]  # ours has to be named

    def all_edges(self) -> list[Edge]:
        cfg, edges = self.model.cfg, []
        senders: list[tuple[str, int | None]] = [("blocks.0.hook_resid_pre", None)]
        for layer in range(cfg.n_layers):
            for letter in "qkv":
                for head in range(cfg.n_heads):
                    edges += [(f"blocks.{layer}.hook_{letter}_input", head, *sender) for sender in senders]
            senders += [(f"blocks.{layer}.attn.hook_result", head) for head in range(cfg.n_heads)]
            if not cfg.attn_only:
                edges += [(f"blocks.{layer}.hook_mlp_in", None, *sender) for sender in senders]
                senders.append((f"blocks.{layer}.hook_mlp_out", None))
        edges += [(f"blocks.{cfg.n_layers - 1}.hook_resid_post", None, *sender) for sender in senders]
        return sorted(edges, key=lambda edge: -self.order.index(edge[0]))

    def sender_hook(self, value: Tensor, hook: Any, to: dict[str, Tensor]) -> Tensor:
        to[hook.name] = value
        return value

    def receiver_hook(self, value: Tensor, hook: Any) -> Tensor:
        value[:] = self.corrupted[hook.name]
        for receiver, head, sender, place in self.edges:
            if receiver == hook.name and self.open[receiver, head, sender, place]:
                value[at(head)] += self.online[sender][at(place)] - self.corrupted[sender][at(place)]
        return value

    def names_of_hooks(self, site: str) -> list[str]:
        """The functions at a site, found as tools find them: through the handles of PyTorch's hooks."""
        handles = self.model.hook_dict[site].fwd_hooks
        dictionaries = [handle.hook.hooks_dict_ref() for handle in handles]
        assert all(one == dictionaries[0] for one in dictionaries)
        assert [handle.hook.id in dictionaries[0] for handle in handles] == [True] * len(handles)
        return [function.__name__ for function in dictionaries[0].values()] if dictionaries else []

    def listen(self, receiver: str) -> None:
        """Hooks at a receiver and at all of its senders, once each: receivers before whatever else is there."""
        if not any("receiver_hook" in name for name in self.names_of_hooks(receiver)):
            self.model.add_hook(name=receiver, hook=partial(self.receiver_hook), prepend=True)
        for sender in dict.fromkeys(edge[2] for edge in self.edges if edge[0] == receiver):
            if not any("sender_hook" in name for name in self.names_of_hooks(sender)):
                self.model.add_hook(name=sender, hook=partial(self.sender_hook, to=self.online))

    def loss(self) -> float:
        with torch.no_grad():
            logits = self.model(CLEAN)
        pair = logits.log_softmax(-1), self.clean.log_softmax(-1)
        return torch.nn.functional.kl_div(*pair, log_target=True, reduction="batchmean").item()

    def run(self) -> list[float]:
        """The loss with each edge cut, in order; an edge that costs less than the threshold stays cut."""
        found, now = [], 0.0
        for edge in self.edges:
            self.listen(edge[0])
            self.open[edge] = False
            loss = self.loss()
            found.append(loss)
            self.open[edge] = loss - now >= self.threshold
            now = now if self.open[edge] else loss
        return found


def everything() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Values, and names and choices, of each model."""
    values: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for name in MODELS:
        search = Search(made(name), threshold=0.02)
        said[f"{name}: order"] = search.order
        values |= {f"{name}: corrupted {site}": search.corrupted[site] for site in search.order}
        values[f"{name}: losses"] = torch.tensor(search.run())
        said[f"{name}: open"] = [list(edge) for edge, is_open in search.open.items() if is_open]
        said[f"{name}: hooks"] = {
            site: [kind for name in search.names_of_hooks(site) for kind in ("sender", "receiver") if kind in name]
            for site, point in search.model.hook_dict.items()
            if point.fwd_hooks
        }
        values[f"{name}: cut"] = search.model(CLEAN)
        search.model.reset_hooks()
        model = copy.deepcopy(search.model)
        values[f"{name}: copy"] = model(CLEAN)
        values |= {f"{name}: {key}": value for key, value in by_hand(model).items()}
    return {key: value.detach().clone().contiguous() for key, value in values.items()}, said


def by_hand(model: Any) -> dict[str, Tensor]:
    """Zero ablation by a function of names, positions scrambled in place, gradients at split inputs, levels."""
    found: dict[str, Tensor] = {}
    parts = ["hook_result", "mlp_out", "blocks.0.hook_resid_pre"]
    cache: dict[str, Tensor] = OrderedDict()
    model.add_hook(lambda name: any(part in name for part in parts), lambda z, hook: torch.zeros_like(z))
    model.cache_all(cache)
    found["zeroed"] = model(CLEAN)
    found |= {f"zeroed {site}": value for site, value in cache.items() if not site.startswith("unembed.")}
    model.reset_hooks()

    def scramble(z: Tensor, hook: Any) -> None:
        z[:] = z[0].flip(0)

    model.add_hook("hook_pos_embed", scramble)
    found["scrambled"] = model(CLEAN)
    model.reset_hooks()
    gradients: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: Any) -> None:
        gradients[hook.name] = grad.clone()

    sites = ("_input", "hook_result", "hook_mlp_out", "hook_resid_post", *(["hook_mlp_in"] * (not model.cfg.attn_only)))
    model.add_hook(lambda name: name.endswith(sites), keep, dir="bwd")
    model(CLEAN).log_softmax(-1)[:, -1, 3].sum().backward()
    model.reset_hooks()
    model.zero_grad()
    found |= {f"gradient {site}": value for site, value in gradients.items()}
    with model.hooks(fwd_hooks=[("hook_embed", lambda z, hook: 2 * z)]):
        model.add_hook("hook_embed", lambda z, hook: z + 1, level=model.context_level)
        model.hook_dict["blocks.1.hook_resid_pre"].add_hook(lambda z, hook: 0.5 * z)
        found["inside"] = model(CLEAN)
    found["after"] = model(CLEAN)
    model.reset_hooks()
    found["reset"] = model(CLEAN)
    return found


def main(folder: str, out: Path) -> None:
    sys.path.insert(0, folder)
    from safetensors.torch import save_file

    values, said = everything()
    save_file(values, out, {"said": json.dumps(said)})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
