"""What the benchmarks count, against counts by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.families import family, supported
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.hub.model_classes import model_class
from tests.benchmarks.families import first_case, real_size
from tests.benchmarks.floor import Size, gemm_rate, incremental_flops
from tests.benchmarks.gpu import main as gpu_main
from tests.benchmarks.peers import spread
from tests.benchmarks.sweeps import PARTS, Side, Task, metric
from tests.close import assert_close
from tests.families._case import Case, built, config_of

# A position costs 16 for its key and value, 8 each for its query and W_O, 24 for its MLP, 8 for each key it looks at:
# besides key and value 48 at position 0 and 56 at position 1.
TINY = Size(n_layers=2, d_model=2, n_heads=1, n_key_value_heads=1, d_head=2, d_mlp=3, gated=False)
RESID_PRE = {
    (0, 0): (16 + 48 + 56) + (2 * 16 + 56),  # its own layer, then the last one, of which only position 1 is read
    (0, 1): (16 + 56) + (16 + 56),
    (1, 0): 16 + 56,
    (1, 1): 16 + 56,
}
MLP_OUT = {(0, 0): RESID_PRE[1, 0], (0, 1): RESID_PRE[1, 1], (1, 0): 0, (1, 1): 0}
ATTN_OUT = {(0, 0): 24 + RESID_PRE[1, 0], (0, 1): 24 + RESID_PRE[1, 1], (1, 0): 0, (1, 1): 24}
Z = {0: 2 * (8 + 24) + (2 * 16 + 56), 1: 8 + 24}


def test_floor_of_every_cell_by_hand() -> None:
    for layer, pos in RESID_PRE:
        assert TINY.entering(layer, pos, 2) == RESID_PRE[layer, pos]
        assert TINY.attn_out(layer, pos, 2) == ATTN_OUT[layer, pos]
        assert TINY.mlp_out(layer, pos, 2) == MLP_OUT[layer, pos]
    assert [TINY.z(layer, 0, 2) for layer in (0, 1)] == list(Z.values())


def test_floor_of_sweeps_by_hand() -> None:
    every = sum(sum(cells.values()) for cells in (RESID_PRE, ATTN_OUT, MLP_OUT))
    assert incremental_flops(TINY, "resid_pre", 1, 2) == 496
    assert incremental_flops(TINY, "block_every", 1, 2) == every == 856
    assert incremental_flops(TINY, "attn_head_out_all_pos", 1, 2) == 184
    assert incremental_flops(TINY, "resid_pre", 8, 2) == 8 * 496
    alike = sum(cost for (_, pos), cost in RESID_PRE.items() if pos == 1)
    assert incremental_flops(TINY, "resid_pre", 1, 2, n_alike=1) == alike
    assert incremental_flops(TINY, "attn_head_out_all_pos", 1, 2, n_alike=1) == (8 + 24) + (16 + 56) + (8 + 24)


def test_floor_counts_groups_heads_and_gates() -> None:
    grouped = Size(n_layers=1, d_model=4, n_heads=4, n_key_value_heads=2, d_head=3, d_mlp=5, gated=True)
    keys_values = 2 * (2 * 4 * 6)
    rest = 2 * 4 * 12 + 2 * 12 * 4 + 3 * (2 * 4 * 5) + 2 * (2 * 12)
    assert incremental_flops(grouped, "resid_pre", 1, 1) == keys_values + rest
    assert incremental_flops(grouped, "attn_head_out_all_pos", 1, 1) == 4 * (2 * 3 * 4 + 3 * (2 * 4 * 5))


def test_gemm_rate_is_a_rate() -> None:
    assert 1e7 < gemm_rate(64, 64, rows=64) < 1e14


@pytest.mark.parametrize(("n_layers", "n_other", "count"), [(12, 16, 12), (12, 64, 12), (12, 12, 4), (3, 2, 3)])
def test_cells_spread_over_layers_and_do_not_repeat(n_layers: int, n_other: int, count: int) -> None:
    rounds = [spread(n_layers, n_other, count, turn) for turn in range(3)]
    for cells in rounds:
        assert len(cells) == len(set(cells)) == count
        assert all(0 <= layer < n_layers and 0 <= other < n_other for layer, other in cells)
        layers = sorted(layer for layer, _ in cells)
        assert max(after - before for before, after in pairwise(layers)) == n_layers // count
    assert len({cell for cells in rounds for cell in cells}) > count


def test_cells_spread_over_positions() -> None:
    thirds = [other * 3 // 64 for _, other in spread(12, 64, 12, 0)]
    assert min(thirds.count(third) for third in range(3)) >= 3


@pytest.mark.parametrize("case", [first_case(name) for name in supported()], ids=str)
def test_a_family_is_timed_at_the_size_of_a_real_model(case: Case) -> None:
    """Both models can be built, without memory, and have the same number of parameters but for parts that we leave out."""
    with torch.device("meta"):
        theirs = built(replace(case, fields=real_size(case)))
    config = config_of(theirs)
    tree = read_config(family(config.model_type), config, [type(theirs).__name__], theirs.state_dict())
    ours = model_class(tree)
    model = ours(ours.config_class.from_tree(tree, init_weights=False, device="meta"))
    n_ours, n_theirs = (sum(weight.numel() for weight in m.parameters()) for m in (model, theirs))
    assert 0.6 < n_ours / n_theirs < 1.05
    assert model.cfg.n_layers >= 10  # some are left out
    assert model.cfg.d_model == 768


class Echo:
    """A peer that answers with our own tables, half a second a cell."""

    def __init__(self, model: HookedTransformer) -> None:
        self.model = model

    def ask(self, job: str, clean: Any, corrupted: Any, answers: Any, cells: dict[str, Any]) -> dict[str, Any]:
        _, cache = self.model.run_with_cache(torch.tensor(clean))
        values = []
        for name, wanted in cells.items():
            table = getattr(patching, name)(self.model, torch.tensor(corrupted), cache, metric)
            values += [table[cell].item() for cell in wanted]
        return {"values": values, "seconds": [0.5] * len(values)}


@pytest.mark.parametrize("sweep", PARTS)
def test_cells_of_a_peer_are_compared_with_the_same_cells_of_ours(sweep: str) -> None:
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 4, "d_vocab": 20, "n_ctx": 8, "act_fn": "relu"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, seed=0, initializer_range=0.3))
    task = Task(model, sweep, n_prompts=2, n_pos=6)
    side = Side(Echo(model), task)
    for _ in range(2):
        side.turn()
    table = task.ours()
    assert table.numel() == task.n_cells == len(PARTS[sweep]) * 3 * (4 if sweep == "attn_head_out_all_pos" else 6)
    assert side.difference(table) < 1e-5
    assert side.scaled(0) == task.n_cells * 0.5
    side.values[-1] += 0.5
    assert_close(side.difference(table), 0.5 / (table.max() - table.min()).item())


@pytest.mark.slow
def test_the_figures_of_a_gpu_in_small_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_main(["--tiny", "llama"]) == 0
    shown = capsys.readouterr().out
    for what in (
        "forward",
        "graph with taps",
        "decode 4 tokens as graphs",
        "residual sweep 3x5",
        "all edges",
        "harvest",
    ):
        assert shown.count(what) >= 2, f"'{what}' in float32 and in bfloat16:\n{shown}"
    assert "nan" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_figures_of_a_gpu_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_main([]) == 2
    assert capsys.readouterr().out.startswith("no GPU: ")
