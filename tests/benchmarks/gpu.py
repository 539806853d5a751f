"""`make bench-gpu`: random models of real shapes on a GPU, in turn with Hugging Face's, each figure beside its error.

python -m tests.benchmarks.gpu [--tiny] [--pairs N] [--dtypes ...] [gpt2 qwen3 llama]     (--tiny: small shapes on the CPU)

Needs torch and transformers alone. TransformerLens is a column of the sweeps where its wheel is installed. Errors are the largest
difference of results to those of the same weights in fp64, relative to the largest of them, in a model of two layers.
"""

import argparse
import gc
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import attribute_edges
from hooked_lm.harvest.documents import documents_of
from hooked_lm.harvest.job import job_of
from hooked_lm.harvest.rows import RowMaker
from tests.benchmarks.harvesting import again
from tests.benchmarks.sweeps import FLAT, metric
from tests.benchmarks.timing import Figure, compare, seconds, show

# fmt: off
SMALL = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 50,
}
SHAPES: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {  # config, model, fields, fields of --tiny
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}, {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 50}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {
        "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }, {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }, SMALL),
}
# fmt: on
LAYERS = {"gpt2": "n_layer", "qwen3": "num_hidden_layers", "llama": "num_hidden_layers"}
CACHE_GOAL, HARVEST_GOAL = 1.1, 1 / 0.9
EVERY_LAYER = "blocks.*.hook_resid_post"


@dataclass(frozen=True)
class Sizes:
    """What is run: prompts x tokens of the forward passes, tokens to decode, prompts and tokens of a harvest, pairs of times."""

    forward: tuple[tuple[int, int], ...] = ((1, 16), (1, 512), (8, 512))
    decode: int = 128
    sweep_tokens: tuple[int, ...] = (16, 64)
    harvest: tuple[int, int] = (64, 512)
    pairs: int = 15
    copied: int = 1 << 30


TINY = Sizes(((2, 12),), 4, (5,), (4, 16), 1, 1 << 22)


@dataclass
class Bench:
    """One shape in one dtype: our model and Hugging Face's with the same weights, and both with two layers in fp64."""

    shape: str
    dtype: torch.dtype
    device: str
    tiny: bool
    pairs: int | None = None

    def __post_init__(self) -> None:
        self.sizes = TINY if self.tiny else Sizes()
        self.pairs = self.sizes.pairs if self.pairs is None else self.pairs
        self.ours, self.theirs = self.models(self.dtype)
        reference, _ = self.models(torch.float64, 2)
        self.exact, (self.slice, self.their_slice) = reference, self.models(self.dtype, 2)

    def models(self, dtype: torch.dtype, n_layers: int | None = None) -> tuple[HookedTransformer, Any]:
        """Our model and Hugging Face's, with the same random weights for each number of layers."""
        config, kind, real, tiny = SHAPES[self.shape]
        fields = {**(tiny if self.tiny else real), "attn_implementation": "sdpa"}
        if n_layers is not None:
            fields[LAYERS[self.shape]] = n_layers
        torch.manual_seed(0)
        with torch.device(self.device):
            theirs = kind(config(**fields)).eval().requires_grad_(False).to(self.dtype).to(dtype)
        ours = HookedTransformer.from_pretrained_no_processing(
            self.shape, hf_model=theirs, dtype=dtype, device=self.device
        )
        return ours.requires_grad_(False), theirs

    def ids(self, batch: int, n_pos: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.ours.cfg.d_vocab, (batch, n_pos), generator=generator).to(self.device)

    def synchronous(self, run: Callable[[], object]) -> Callable[[], None]:
        """The run, until the GPU has done its work."""

        def whole() -> None:
            run()
            if self.device != "cpu":
                torch.cuda.synchronize()

        return whole

    def error(self, result: Callable[[Any], Tensor], of: Any = None) -> str:
        """How far the result of a model of two layers is from that in fp64."""
        exact = result(self.exact).double()
        off = (result(self.slice if of is None else of).double() - exact).abs().max() / exact.abs().max()
        return f"{off.item():.0e}"

    def row(
        self,
        what: str,
        ours: Callable[[], object],
        against: str,
        theirs: Callable[[], object],
        errors: str,
        goal: float = math.inf,
    ) -> Figure:
        f = compare(what, self.synchronous(ours), against, self.synchronous(theirs), goal, self.pairs)
        return Figure(f.what, f.against, f.ratio, f.bound, f"{f.detail}; error {errors}")

    # ---- parts -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forwards(self) -> Iterator[Figure]:
        """Forward passes, caches and graphs."""
        for batch, n_pos in self.sizes.forward:
            tokens, size, ours = self.ids(batch, n_pos), f"{batch}x{n_pos}", self.ours
            bare = partial(ours, tokens)
            small = self.ids(1, min(n_pos, 16))
            error = self.error(lambda model, small=small: model(small))
            both = f"{error} / {self.error(lambda model, small=small: _logits(model, small), self.their_slice)}"
            yield self.row(f"forward {size}", bare, "HF sdpa", partial(self.theirs, tokens), both)
            kept = partial(ours.run_with_cache, tokens, names_filter=EVERY_LAYER)
            yield self.row(f"cache of all layers {size}", kept, "our forward", bare, error, CACHE_GOAL)
            copied = partial(kept, device="cpu")
            yield self.row(f"the same, copied to the CPU {size}", copied, "our forward", bare, error, CACHE_GOAL)
            yield from self._graphs(size, tokens, bare)

    def _graphs(self, size: str, tokens: Tensor, bare: Callable[[], object]) -> Iterator[Figure]:
        backend = "traced" if self.tiny else "auto"
        graph, tapped = self.ours.compiled(backend=backend), self.ours.compiled(taps=EVERY_LAYER, backend=backend)
        error = self.error(lambda model: model.compiled(backend=backend)(tokens[:1, :16]))
        yield self.row(f"graph {size}", partial(graph, tokens), "our forward", bare, error)
        yield self.row(
            f"graph with taps {size}", partial(tapped, tokens), "graph", partial(graph, tokens), error, CACHE_GOAL
        )

    @torch.no_grad()
    def decoding(self) -> Iterator[Figure]:
        """Decoding, against the time in which the weights are read once for every token."""
        prompt, n_new, ours = self.ids(1, 16), self.sizes.decode, self.ours
        run = ours.compiled(backend="traced" if self.tiny else "auto")

        def steps() -> None:
            logits = run.prefill(prompt, n_new)
            for _ in range(n_new):
                logits = run.step(logits.argmax(-1))

        def eager() -> None:
            ours.generate(prompt, n_new, do_sample=False, stop_at_eos=False, verbose=False)

        n_bytes = sum(p.numel() * p.element_size() for name, p in ours.named_parameters() if "embed.W_" not in name)
        n_bytes += ours.W_U.numel() * ours.W_U.element_size()
        floor = n_new * n_bytes / self.bandwidth()
        error = self.error(lambda model: _last_step(model, prompt))
        for what, call in (("eagerly", eager), ("as graphs", steps)):
            self.synchronous(call)()
            taken = sorted(seconds(self.synchronous(call)) for _ in range(3))[1]
            detail = f"{taken * 1e3:.1f} / {floor * 1e3:.1f} ms, {n_new / taken:.0f} tokens/s; error {error}"
            yield Figure(f"decode {n_new} tokens {what}", "reading the weights", taken / floor, math.inf, detail)

    def bandwidth(self) -> float:
        """Bytes that a copy reads and writes in a second."""
        source = torch.empty(self.sizes.copied, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = self.synchronous(partial(target.copy_, source))
        copy()
        return 2 * self.sizes.copied / min(seconds(copy) for _ in range(10))

    @torch.no_grad()
    def sweeps(self) -> Iterator[Figure]:
        """Sweeps of the residual stream, against a forward pass of Hugging Face for every cell (one is timed)."""
        for n_pos in self.sizes.sweep_tokens:
            clean, corrupted = self.ids(1, n_pos), self.ids(1, n_pos, seed=1)
            n_cells = self.ours.cfg.n_layers * n_pos

            def sweep(model: Any, clean: Tensor = clean, corrupted: Tensor = corrupted) -> Tensor:
                return patching.sweep(model, corrupted, clean, metric=metric, progress=False).values

            what, error = f"residual sweep {self.ours.cfg.n_layers}x{n_pos}", self.error(sweep)
            f = self.row(what, partial(sweep, self.ours), "a forward of HF", partial(self.theirs, clean), error)
            yield Figure(what, f"{n_cells} forwards of HF", f.ratio / n_cells, math.inf, f.detail)
            if (peer := self._peer()) is not None:
                name, patch = peer
                yield self.row(what, partial(sweep, self.ours), name, partial(patch, clean, corrupted), error)

    def _peer(self) -> tuple[str, Callable[[Tensor, Tensor], object]] | None:
        """The sweep of the TransformerLens that is installed; None if none is."""
        try:
            name = f"TransformerLens {version('transformer-lens')}"
        except PackageNotFoundError:
            return None
        import transformer_lens.patching

        from tests.benchmarks import peer_sweeps

        with tempfile.TemporaryDirectory() as folder:
            self.theirs.save_pretrained(folder)
            weights = {name: weight.cpu().contiguous() for name, weight in self.ours.state_dict().items()}
            torch.save(weights, Path(folder) / "flat.pt")
            flat = {field: getattr(self.ours.cfg, field) for field in FLAT}
            (Path(folder) / "flat.json").write_text(json.dumps(flat))
            old = version("transformer-lens").startswith("3.")
            model = (peer_sweeps.classic if old else peer_sweeps.bridge)(Path(folder)).to(self.device)

        def patch(clean: Tensor, corrupted: Tensor) -> object:
            _, cache = model.run_with_cache(clean)
            return transformer_lens.patching.get_act_patch_resid_pre(model, corrupted, cache, metric)

        return name, patch

    def attribution(self) -> Iterator[Figure]:
        """All edges, against a training step."""
        clean, corrupted = self.ids(1, 16), self.ids(1, 16, seed=1)

        def edges(model: Any) -> Tensor:
            return attribute_edges(model, corrupted, clean, metric=metric, check=False).values.nan_to_num()

        def step() -> None:
            self.theirs.requires_grad_(True)
            metric(self.theirs(corrupted).logits).backward()
            self.theirs.zero_grad()
            self.theirs.requires_grad_(False)

        yield self.row("all edges 1x16", partial(edges, self.ours), "HF forward + backward", step, self.error(edges))

    @torch.no_grad()
    def harvests(self) -> Iterator[Figure]:
        """A harvest of a layer in the middle, against the forward passes to that layer."""
        (rows, context), batch, stop = self.sizes.harvest, 8, self.ours.cfg.n_layers // 2
        tokens, site = self.ids(rows, context).cpu(), f"blocks.{stop - 1}.hook_resid_post"

        def bare() -> None:
            for some in tokens.split(batch):
                self.ours(some.to(self.device), stop_at_layer=stop)

        with tempfile.TemporaryDirectory() as folder:
            job = job_of(
                self.ours, documents_of(tokens), site, folder, RowMaker(self.ours, context), dtype=self.dtype, reduce=None,
                batch_size=batch, shard_bytes=1 << 29, documents_per_shard=max(rows // 2, 1),
            )  # fmt: skip
            error = self.error(lambda model: model(tokens[:1].to(self.device), stop_at_layer=1))
            f = self.row(
                f"harvest {rows}x{context}", partial(again, job), "forward to the layer", bare, error, HARVEST_GOAL
            )
            rate = rows * context / seconds(self.synchronous(partial(again, job)))
            yield Figure(f.what, f.against, f.ratio, f.bound, f"{f.detail}; {rate:.0f} tokens/s")


def _logits(theirs: Any, tokens: Tensor) -> Tensor:
    result = theirs(tokens)
    return result if isinstance(result, Tensor) else result.logits


def _last_step(model: HookedTransformer, prompt: Tensor) -> Tensor:
    """The logits of a decode step after the prompt."""
    run = model.compiled(backend="traced")
    run.prefill(prompt, 1)
    return run.step(prompt[:, 0])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--pairs", type=int, help="how many times the two sides of a row run in turn")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE")
    parser.add_argument("shapes", nargs="*", help=", ".join(SHAPES))
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        print(
            "no GPU: torch.cuda.is_available() is False (python -m tests.benchmarks.gpu --tiny runs small shapes on the CPU)"
        )
        return 2
    device = "cpu" if given.tiny else "cuda"
    print(
        f"torch {torch.__version__}, {device if given.tiny else torch.cuda.get_device_name()}; medians of ratios, ours / theirs"
    )
    for shape in given.shapes or SHAPES:
        for dtype in given.dtypes:
            bench = Bench(shape, getattr(torch, dtype), device, given.tiny, given.pairs)
            parts = (bench.forwards, bench.decoding, bench.sweeps, bench.attribution, bench.harvests)
            show(f"{shape}, {dtype}", [figure for part in parts for figure in part()])
            del bench, parts
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
