"""The small helpers of the shim, each against an independent computation."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hooked_lm import FactoredMatrix, HookedTransformer, compat
from hooked_lm.compat import (
    activations,
    architectures,
    attributes,
    devices,
    downloads,
    initialisers,
    linear,
    modules,
    positions,
    tensors,
    tokenizers,
)
from tests.close import assert_apart, assert_close, assert_near, is_close

DEMO = Path(compat.__file__).parents[1] / "demo" / "model"


@pytest.fixture
def shim() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


# ---- tensors -------------------------------------------------------------------------------------------------------


def test_transpose_swaps_the_last_two_axes() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(tensors.transpose(x), torch.stack([x[0].T, x[1].T]))


def test_shapes_of_matrices() -> None:
    lower = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    assert tensors.is_square(lower)
    assert not tensors.is_square(lower[:1])
    assert not tensors.is_square(torch.zeros(2, 2, 2))
    assert tensors.is_lower_triangular(lower)
    assert not tensors.is_lower_triangular(lower.T)
    assert not tensors.is_lower_triangular(lower[:1])


def test_running_sums_from_either_end() -> None:
    x = torch.randn(3, 5, dtype=torch.double)
    for i in range(5):
        assert_close(tensors.get_cumsum_along_dim(x, 1)[:, i], x[:, : i + 1].sum(1))
        assert_close(tensors.get_cumsum_along_dim(x, -1, reverse=True)[:, i], x[:, i:].sum(1))


def test_a_prefix_ends_at_a_dot() -> None:
    weights = {"h.1.attn.W": 1, "h.10.attn.W": 2, "h.1": 3}
    assert tensors.filter_dict_by_prefix(weights, "h.1") == {"attn.W": 1}
    assert tensors.filter_dict_by_prefix(weights, "h.1.") == {"attn.W": 1}


def test_a_corner_of_a_product() -> None:
    matrix = FactoredMatrix(torch.randn(4, 5, 2), torch.randn(4, 2, 6))
    assert_close(tensors.get_matrix_corner(matrix, 3), (matrix.A @ matrix.B)[:3, :3, :3])


def test_the_order_of_rows_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    first = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    tensors.check_structure(first, first * 2)
    assert capsys.readouterr().out == "PASSED\n"
    second = first.clone()
    second[2, 0] = 0.0  # falls below the row above, and no column changes its order
    tensors.check_structure(first, second)
    assert capsys.readouterr().out == "row mismatch: [1]\n"
    second[0, 2] = 0.0
    tensors.check_structure(first, second, verbose=True)
    out = capsys.readouterr().out
    assert "column mismatch: [1]" in out
    assert "rows 1, 2" in out
    assert "PASSED" not in out


def test_logits_as_a_table(model: HookedTransformer) -> None:
    logits = model("The capital of France is")[0, -1]
    table = tensors.logits_to_df(logits, model.tokenizer)
    probs = logits.softmax(0)
    assert table["token_string"][0] == " Paris"
    assert table["token_index"][0] == probs.argmax()
    assert len(table) == len(logits)
    found = torch.tensor(table["probability"].to_numpy(copy=True), dtype=torch.float)
    assert_close(found, found.sort(descending=True).values)
    assert_close(found, probs[table["token_index"].tolist()])
    assert_close(found.log(), torch.tensor(table["log_prob"].to_numpy(copy=True)).float())
    short = tensors.logits_to_df(logits, top_k=3)
    assert list(short.columns) == ["token_index", "logit", "log_prob", "probability"]
    assert_close(short["probability"].tolist(), table["probability"].tolist()[:3])  # of the whole vocabulary


# ---- attributes ----------------------------------------------------------------------------------------------------


def test_attributes_by_dotted_names(model: HookedTransformer) -> None:
    assert attributes.get_nested_attr(model, "blocks.0.attn.W_Q") is model.blocks[0].attn.W_Q
    holder = SimpleNamespace(inner=SimpleNamespace(value=1), top=2)
    attributes.set_nested_attr(holder, "inner.value", 5)
    attributes.set_nested_attr(holder, "top", 6)
    assert (holder.inner.value, holder.top) == (5, 6)
    with pytest.raises(AttributeError, match="missing"):
        attributes.get_nested_attr(holder, "inner.missing")


def test_values_left_at_a_default() -> None:
    assert attributes.override_or_use_default_value(True) is True
    assert attributes.override_or_use_default_value(True, override=False) is False


def test_arguments_that_a_function_takes() -> None:
    def takes(a: int, *, b: int = 0, **rest: int) -> None: ...

    assert attributes.select_compatible_kwargs({"a": 1, "b": 2, "c": 3, "rest": 4}, takes) == {"a": 1, "b": 2}


def test_a_library_is_looked_for_without_importing_it() -> None:
    assert attributes.is_library_available("wave")
    assert "wave" not in sys.modules or attributes.is_library_available("wave")
    assert not attributes.is_library_available("no_such_library_anywhere")


# ---- initialisers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "fans"), [((7,), (1, 7)), ((5, 7), (5, 7)), ((3, 5, 7), (5, 21))], ids=["bias", "matrix", "heads"]
)
def test_fans(shape: tuple[int, ...], fans: tuple[int, int]) -> None:
    assert initialisers.calc_fan_in_and_fan_out(torch.zeros(shape)) == fans


@pytest.mark.parametrize("shape", [(), (1, 2, 3, 4)])
def test_fans_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected the shape"):
        initialisers.calc_fan_in_and_fan_out(torch.zeros(shape))


@pytest.mark.parametrize(
    ("fill", "options", "std"),
    [
        (initialisers.init_xavier_normal_, {}, (2 / (200 + 300)) ** 0.5),
        (initialisers.init_xavier_uniform_, {"gain": 3.0}, 3 * (2 / (200 + 300)) ** 0.5),
        (initialisers.init_kaiming_normal_, {}, (2 / 200) ** 0.5),
        (initialisers.init_kaiming_uniform_, {"nonlinearity": "linear"}, (1 / 200) ** 0.5),
        (initialisers.init_kaiming_uniform_, {"mode": "fan_out", "gain": 2.0}, 2 * (2 / 300) ** 0.5),
        (initialisers.init_kaiming_normal_, {"nonlinearity": "leaky_relu", "a": 2.0}, (2 / 5 / 200) ** 0.5),
    ],
)
def test_deviations(fill: Any, options: dict[str, Any], std: float) -> None:
    weight = torch.zeros(200, 300)
    state = torch.get_rng_state()
    found = fill(weight, **options, generator=torch.Generator().manual_seed(0))
    assert found is weight
    assert torch.equal(torch.get_rng_state(), state)
    assert_near(weight.std(), std, 0.02, because="a deviation of 60,000 draws")
    assert abs(weight.mean().item()) < std / 50
    largest = weight.abs().max().item() / std
    if "uniform" in fill.__name__:
        assert_near(largest, 3**0.5, 0.01, because="the largest of 60,000 draws")
    else:
        assert largest > 3
    fill(weight, **options)
    assert not torch.equal(torch.get_rng_state(), state)  # torch's own generator, unless another is given


def test_an_unknown_fan() -> None:
    with pytest.raises(ValueError, match="'fan_in' or 'fan_out', got 'both'"):
        initialisers.init_kaiming_normal_(torch.zeros(2, 2), mode="both")


# ---- activation functions ------------------------------------------------------------------------------------------


def test_activations_have_their_familiar_names() -> None:
    theirs = {"solu", "solu_ln", "gelu_new", "gelu_fast", "silu", "relu", "gelu", "gelu_pytorch_tanh", "xielu", "relu2"}
    assert theirs <= activations.SUPPORTED_ACTIVATIONS.keys()
    x = torch.randn(2, 3, 4)
    assert_close(activations.SUPPORTED_ACTIVATIONS["relu2"](x), x.clamp(min=0) ** 2)
    assert_close(activations.gelu_pytorch_tanh(x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("numbers", [(0.8, 0.8, 0.5), (1.5, 0.9, 0.2)])
def test_xielu(numbers: tuple[float, float, float]) -> None:
    a_p, a_n, beta = numbers
    x = torch.linspace(-3, 3, 61, dtype=torch.double)
    expected = torch.where(x > 0, a_p * x**2 + beta * x, a_n * (x.clamp(max=-1e-6).exp() - 1 - x) + beta * x)
    module = activations.XIELU(a_p, a_n, beta).double()
    assert_close(module(x), expected, dtype=torch.float32)  # its numbers are made in it
    assert [name for name, _ in module.named_parameters()] == ["alpha_p", "alpha_n"]
    same = is_close(activations.xielu(x).float(), expected.float())  # its numbers are in float32
    assert same == (numbers == (0.8, 0.8, 0.5))


@pytest.mark.parametrize("cap", [None, 0.0, -1.0, activations.SOFTCAP_DISABLED])
def test_no_bound(cap: float | None) -> None:
    x = torch.randn(5) * 100
    assert not activations.softcap_enabled(cap)
    assert activations.apply_softcap(x, cap) is x


def test_a_bound() -> None:
    x = torch.tensor([-1e4, 0.01, 1e4])
    assert activations.softcap_enabled(30.0)
    assert_close(activations.apply_softcap(x, 30.0), torch.tensor([-30.0, 0.01, 30.0]))


# ---- linear maps ---------------------------------------------------------------------------------------------------


def test_linear_maps_of_mlps() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)
    assert_close(linear.batch_addmm(bias, weight, x), x @ weight + bias)
    assert_close(linear.vanilla_addmm(bias, x[0], weight), x[0] @ weight + bias)
    turned = x.transpose(0, 1)  # no view of it is flat
    assert_close(linear.batch_addmm(bias, weight, turned), turned @ weight + bias)


def test_linear_maps_of_heads() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(6, 4, 5), torch.randn(6, 5)
    each = torch.stack([x @ weight[head] + bias[head] for head in range(6)], 2)
    assert_close(linear.simple_attn_linear(x, weight, bias), each)
    split = torch.randn(2, 3, 6, 4)
    each = torch.stack([split[:, :, head] @ weight[head] + bias[head] for head in range(6)], 2)
    assert_close(linear.complex_attn_linear(split, weight, bias), each)


def test_clamping_makes_new_tensors() -> None:
    q, k, v = torch.randn(3, 2, 3, 4) * 5
    found = linear.clamp_qkv(q, k, v, 1.0)
    assert all(x.abs().max() == 1 for x in found)
    assert q.abs().max() > 1


# ---- modules -------------------------------------------------------------------------------------------------------


def test_a_list_of_modules_is_one() -> None:
    layers = modules.TypedModuleList[nn.Linear]([nn.Linear(2, 3), nn.Linear(3, 2)])
    assert isinstance(layers, nn.ModuleList)
    assert [name for name, _ in layers.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_parameter_gets_its_values_back(model: HookedTransformer) -> None:
    weight = model.blocks[1].attn.W_O
    tokens, own = model.to_tokens("Mary and John went"), weight.detach().clone()
    plain = model(tokens)
    with modules.temporarily_swap_parameter(weight, torch.zeros_like(own)) as swapped:
        assert swapped is weight
        assert_apart(model(tokens), plain)
    with pytest.raises(KeyError), modules.temporarily_swap_parameter(weight, own + 1):
        raise KeyError
    assert torch.equal(model.blocks[1].attn.W_O, own)
    assert torch.equal(model(tokens), plain)


def test_only_values_that_fit() -> None:
    weight = nn.Parameter(torch.zeros(2))
    for value, what in ((torch.zeros(3), "shape"), (torch.zeros(2, dtype=torch.double), "dtype")):
        with pytest.raises(ValueError, match=what), modules.temporarily_swap_parameter(weight, value):
            pass
    with pytest.raises(TypeError, match="plain tensor"), modules.temporarily_swap_parameter(weight, weight):
        pass


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_a_bos(model: HookedTransformer) -> None:
    tokenizer = model.tokenizer
    plain = tokenizer.encode("Mary went")
    tokenizer.padding_side = "left"
    try:
        with_bos = tokenizers.get_tokenizer_with_bos(tokenizer)
        assert with_bos.padding_side == "left"
    finally:
        tokenizer.padding_side = "right"
    assert with_bos.encode("Mary went") == [tokenizer.bos_token_id, *plain]
    assert with_bos.encode("Mary went", add_special_tokens=False) == plain
    assert tokenizer.encode("Mary went") == plain  # the one that was given is as it was
    assert tokenizers.get_tokenizer_with_bos(with_bos) is with_bos


def test_a_tokenizer_without_a_bos() -> None:
    none = SimpleNamespace(bos_token=None)
    assert tokenizers.get_tokenizer_with_bos(none) is none


def test_a_bos_in_front_of_texts() -> None:
    prepend = tokenizers.get_input_with_manually_prepended_bos
    assert prepend("<s>", "a") == "<s>a"
    assert prepend("<s>", ["a", ""]) == ["<s>a", "<s>"]
    assert prepend(None, ["a"]) == ["a"]


# ---- caches of keys and values -------------------------------------------------------------------------------------


def test_positions_in_a_cache(model: HookedTransformer) -> None:
    from hooked_lm.components.kv_cache import KeyValueCache

    cache = KeyValueCache.init_cache(model.cfg)
    assert positions.get_pos_offset(cache, 1) == positions.get_pos_offset(None, 1) == 0
    model(torch.tensor([[5, 6, 7]]), past_kv_cache=cache)
    assert positions.get_pos_offset(cache, 1) == 3


# ---- files of the hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "config.json").write_text('{"n": 1}')
    (tmp_path / "deep" / "config.json").write_text('{"n": 2}')
    torch.save({"w": torch.arange(3)}, tmp_path / "model.pth")
    torch.save({"w": torch.arange(3)}, tmp_path / "model.bin")
    return tmp_path


@pytest.mark.parametrize("local", [True, False], ids=["directory", "hub"])
def test_files(repository: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    asked: list[dict[str, Any]] = []

    def hf_hub_download(
        repo_id: str, filename: str, *, subfolder: str | None = None, revision: str | None = None, cache_dir: Any = None
    ) -> str:
        asked.append({"repo_id": repo_id, "subfolder": subfolder, "revision": revision, "cache_dir": cache_dir})
        return str(repository / (subfolder or ".") / filename)

    monkeypatch.setattr(downloads, "hf_hub_download", hf_hub_download)
    name = str(repository) if local else "gpt2"
    fetch = downloads.download_file_from_hf
    assert fetch(name, "config.json") == {"n": 1}
    assert fetch(name, "config.json", subfolder="deep", revision="r1", unknown="dropped") == {"n": 2}
    for loaded in (fetch(name, "model.pth"), fetch(name, "model.bin", force_is_torch=True)):
        assert loaded["w"].tolist() == [0, 1, 2]
    assert Path(fetch(name, "model.bin")) == repository / "model.bin"
    if local:
        assert asked == []
        with pytest.raises(FileNotFoundError, match=r"missing\.json in the directory"):
            fetch(name, "missing.json")
    else:
        gpt2 = {"repo_id": "openai-community/gpt2", "cache_dir": None}
        assert asked[0] == gpt2 | {"subfolder": None, "revision": None}
        assert asked[1] == gpt2 | {"subfolder": "deep", "revision": "r1"}


class Evil:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("it ran",)


def test_code_in_a_pickle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Evil(), tmp_path / "model.pth")
    with pytest.raises(Exception, match=r"weights_only|WeightsUnpickler"):
        downloads.download_file_from_hf(str(tmp_path), "model.pth")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_cache_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    """In a process whose hub keeps its cache in a folder of this test."""
    cache = tmp_path / "hub"
    for folder in ("models--a--b/snapshots", "datasets--c/blobs", ".locks/models--a--b", "of_mine", "deep/models--x"):
        (cache / folder).mkdir(parents=True)
        (cache / folder / "file").write_text("x")
    (cache / "version.txt").write_text("1")
    (tmp_path / "token").write_text("kept")
    code = (
        "from hooked_lm.compat.downloads import CACHE_DIR, clear_huggingface_cache as clear\n"
        "print(CACHE_DIR)\nclear()\nclear()"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)} | {"HF_HUB_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=DEMO.parents[2]
    )
    assert done.stdout.strip() == str(cache)
    assert sorted(path.name for path in cache.iterdir()) == ["deep", "of_mine"]
    assert (tmp_path / "token").exists()


class Columns:
    """What of a data set's interface is used."""

    def __init__(self, *names: str) -> None:
        self.column_names = list(names)

    def remove_columns(self, names: list[str]) -> "Columns":
        return Columns(*(name for name in self.column_names if name not in names))


def test_one_column_is_kept() -> None:
    assert downloads.keep_single_column(Columns("a", "text", "b"), "text").column_names == ["text"]
    one = Columns("text")
    assert downloads.keep_single_column(one, "text") is one


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"rotary_pct": 0.25}, 0.25),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
        ({"rope_parameters": None}, 1.0),
        ({}, 1.0),
    ],
)
def test_how_much_of_a_head_rotates(fields: dict[str, Any], part: float) -> None:
    assert downloads.get_rotary_pct_from_config(SimpleNamespace(**fields)) == part


# ---- devices -------------------------------------------------------------------------------------------------------

GIB = 2**30


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of 8 GiB on which tensors take 6, 1 and 3."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda i=0: (6, 1, 3)[i] * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((1, 6, 4)[i] * GIB, 8 * GIB))


@pytest.mark.usefixtures("three_gpus")
def test_the_gpu_with_the_most_room(capsys: pytest.CaptureFixture[str]) -> None:
    free = devices.determine_available_memory_for_available_devices(3)
    assert free == [(0, 2 * GIB), (1, 7 * GIB), (2, 5 * GIB)]
    assert devices.sort_devices_based_on_available_memory(free) == [free[1], free[2], free[0]]
    assert devices.get_best_available_cuda_device() == torch.device("cuda", 1)
    assert devices.get_best_available_cuda_device(1) == torch.device("cuda", 0)
    best = devices.get_best_available_device
    assert best(SimpleNamespace(device="cuda", n_devices=3)) == torch.device("cuda", 1)
    assert best(SimpleNamespace(device="cuda:2", n_devices=1)) == torch.device("cuda", 2)
    assert best(SimpleNamespace(device="cpu", n_devices=3)) == torch.device("cpu")
    devices.print_gpu_mem("start")
    assert capsys.readouterr().out == "start ~ 6.00 GiB allocated on GPU.\n"


def test_no_gpu() -> None:
    with pytest.raises(OSError, match="there is no CUDA device"):
        devices.get_best_available_cuda_device(0)


def test_layers_are_spread_evenly() -> None:
    where = devices.get_device_for_block_index
    for n_layers, n_devices in ((12, 4), (62, 8), (2, 3)):
        cfg = SimpleNamespace(device="cuda", n_layers=n_layers, n_devices=n_devices)
        found = [where(layer, cfg).index for layer in range(n_layers)]
        assert found == sorted(found)
        assert found[-1] < n_devices
        counts = [found.count(i) for i in set(found)]
        assert max(counts) - min(counts) <= 1
    assert where(1, cfg, "cuda:2") == torch.device("cuda", 3)
    assert where(1, cfg, "cpu") == torch.device("cpu")


@pytest.mark.usefixtures("three_gpus")
def test_device_maps_for_transformers() -> None:
    resolve = devices.resolve_device_map
    assert resolve(None, None, "cpu") == resolve(1, None, None) == (None, None)
    assert resolve(2, None, None) == ("balanced", {0: GIB, 1: 6 * GIB})
    assert resolve(2, None, None, {0: "1GiB"}) == ("balanced", {0: "1GiB"})
    assert resolve(None, {"": 0}, None, {0: 5}) == ({"": 0}, {0: 5})
    for arguments, complaint in (
        ((None, "auto", "cuda"), "not both"),
        ((None, {"a": "disk"}, None), "offloads weights to disk"),
        ((None, {"a": "cpu", "b": 0}, None), "both a CPU and GPUs"),
        ((4, None, None), "there are 3"),
    ):
        with pytest.raises(ValueError, match=complaint):
            resolve(*arguments)


def test_models_that_are_spread() -> None:
    spread = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    assert devices.find_embedding_device(spread) is None
    assert devices.count_unique_devices(spread) == 1
    assert devices.find_misplaced_modules(spread) == []
    spread.hf_device_map = {"embed": "cpu", "head": 1}
    assert devices.find_embedding_device(spread) == torch.device("cpu")  # the first of the map
    assert devices.count_unique_devices(spread) == 2
    assert devices.find_misplaced_modules(spread) == [("head", "cuda:1", "cpu")]
    spread.hf_device_map = {"head": 1, "embed": "cpu"}
    assert devices.find_embedding_device(spread) == torch.device("cuda", 1)
    spread.get_input_embeddings = lambda: spread["embed"]
    assert devices.find_embedding_device(spread) == torch.device("cpu")  # where the embedding is


def test_the_config_follows_a_move(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.cfg = SimpleNamespace(device="cpu", dtype=torch.float32)

        def to(self, where: Any) -> "Own":  # type: ignore[override]
            return devices.move_to_and_update_config(self, where)

    module = Own()
    assert isinstance(module, devices.ModelWithCfg)
    assert module.to(torch.float64) is module
    assert module.weight.dtype == module.cfg.dtype == torch.float64
    assert capsys.readouterr().out == "dtype of the model: torch.float64\n"
    devices.move_to_and_update_config(module, torch.device("meta"), print_details=False)
    assert module.weight.is_meta
    assert module.cfg.device == "meta"
    assert capsys.readouterr().out == ""


def test_a_model_of_ours_moves_too(model: HookedTransformer) -> None:
    copy = HookedTransformer(model.cfg.to_dict() | {"device": "cpu"})
    devices.move_to_and_update_config(copy, torch.float64, print_details=False)
    assert copy.W_E.dtype == copy.cfg.dtype == torch.float64


def test_a_warning_of_apple_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERLENS_ALLOW_MPS", raising=False)
    devices._warn_of_mps.cache_clear()
    devices.warn_if_mps("cpu")
    monkeypatch.setenv("TRANSFORMERLENS_ALLOW_MPS", "1")
    devices.warn_if_mps("mps")
    monkeypatch.delenv("TRANSFORMERLENS_ALLOW_MPS")
    with pytest.warns(UserWarning, match="compare with a run on the CPU"):
        devices.warn_if_mps(torch.device("mps:0"))
    devices.warn_if_mps("mps")  # once


# ---- architectures -------------------------------------------------------------------------------------------------


def test_the_kinds_of_our_families() -> None:
    """The sets hold the classes that transformers has for what we load, by the class of ours.

    It has none for language models that exist only inside of composites.
    """
    from transformers.models.auto import modeling_auto as auto

    from hooked_lm.families import model_class, supported
    from tests.families import CASES

    tables = {
        "HookedEncoderDecoder": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "seq2seq"),
        "HookedEncoder": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "masked_lm"),
        "HookedTransformer": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal_lm"),
    }
    with_images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # lists Mistral4ForCausalLM, which reads text alone
    found: dict[str, set[str]] = {kind: set() for _, kind in tables.values()}
    inside = {case.family for case in CASES if case.composite is not None}
    for model_type in (set(supported()) - inside) & {case.family for case in CASES}:
        names, kind = tables[model_class(model_type)]
        if model_type == "bert-generation":  # transformers has no class of it for masked tokens
            assert model_type not in names
            continue
        name = names[model_type] if model_type in names else with_images[model_type]
        found[kind].add(name)
        assert architectures.classify_architecture(name) == kind
    assert architectures.SEQ2SEQ_ARCHITECTURES - {"T5WithLMHeadModel"} == found["seq2seq"]
    assert found["masked_lm"] == architectures.MASKED_LM_ARCHITECTURES


@pytest.mark.slow
def test_families_with_norms_only_after_sublayers() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from hooked_lm.families import family
    from hooked_lm.families._shared.reader import HFConfig
    from tests.families import DECODER_CASES

    found = set()
    for case in {case.family: case for case in DECODER_CASES}.values():
        values = CONFIG_MAPPING[case.family](**copy.deepcopy(case.fields)).to_dict()
        blocks = family(case.family).config(HFConfig(values, {})).blocks
        if all(getattr(block, "ln1", None) is None and getattr(block, "ln1_post", None) for block in blocks):
            found.add(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.family])
    assert found == architectures.POST_NORM_ARCHITECTURES


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "causal_lm"),
        ({"architectures": ["T5Model"], "is_encoder_decoder": True}, "seq2seq"),
        ({"architectures": None, "original_architecture": "BertForMaskedLM"}, "masked_lm"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "multimodal"),
        ({"architectures": ["HubertForCTC"]}, "audio"),
        ({"architectures": ["ViTForImageClassification"]}, "vision"),
    ],
)
def test_kinds_of_configs_and_checkpoints(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert architectures.classify_model_config(SimpleNamespace(**config)) == kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = str(tmp_path)
    assert architectures.classify_model_name(name, trust_remote_code=True) == kind
    answers = {
        "masked_lm": architectures.is_masked_lm_model(name),
        "seq2seq": architectures.is_encoder_decoder_model(name),
        "multimodal": architectures.is_multimodal_model(name),
        "audio": architectures.is_audio_model(name),
    }
    assert [which for which, answer in answers.items() if answer] == [kind for kind in [kind] if kind in answers]


# ---- the names of the shim ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("shim")
def test_the_lent_modules_hold_them() -> None:
    import transformer_lens.evals
    import transformer_lens.train
    from transformer_lens import utilities, utils
    from transformer_lens.utilities import devices as lent_devices
    from transformer_lens.utilities import hf_utils, multi_gpu
    from transformer_lens.utilities import tensors as lent_tensors

    assert utils.is_square is utilities.is_square is lent_tensors.is_square is tensors.is_square
    assert utils.ACTIVATION_FN_DICT is utilities.SUPPORTED_ACTIVATIONS is activations.SUPPORTED_ACTIVATIONS
    assert utils.CACHE_DIR == hf_utils.CACHE_DIR == downloads.CACHE_DIR
    assert lent_devices.get_best_available_device is multi_gpu.get_best_available_device
    assert not isinstance(getattr(utils, "slice", slice), type(sys))  # `import *` leaves Python's own slice alone
    assert transformer_lens.evals.IOIDataset.__module__ == "hooked_lm.compat.ioi"
    assert transformer_lens.train.train.__module__ == "hooked_lm.compat.train"
