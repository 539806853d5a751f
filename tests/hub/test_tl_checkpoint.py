"""Checkpoints with a config in flat names: toys written as TransformerLens writes its own, and read back."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedEncoder, HookedTransformer, HookedTransformerConfig, hub, pretrained
from hooked_lm.compat import loading
from hooked_lm.hub.options import Options
from hooked_lm.hub.source import find
from hooked_lm.hub.tl_checkpoint import find_tl
from hooked_lm.hub.tl_weights import from_early_solu
from tests.close import assert_apart, assert_close
from tests.devices import labelled_devices, values

TOKENS = torch.arange(22).view(2, 11)
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_head": 8, "n_ctx": 12, "d_vocab": 30}
KINDS: dict[str, dict[str, Any]] = {
    "attention only": {"attn_only": True},
    "gelu": {"act_fn": "gelu", "d_mlp": 40},
    "solu_ln": {"act_fn": "solu_ln", "d_mlp": 96},
    "solu_ln without weights of norms": {"act_fn": "solu_ln", "d_mlp": 96, "normalization_type": "LNPre"},
    "shortformer": {"attn_only": True, "positional_embedding_type": "shortformer"},
    "no norms": {"act_fn": "relu", "d_mlp": 40, "normalization_type": None},
    "final norm of another kind": {"act_fn": "gelu", "d_mlp": 40, "final_rms": True},
}
# What stands in such a config besides; some of it has the name of a field of ours.
OF_THE_TRAINING = {
    "lr_hidden": 2e-3,
    "betas": [0.9, 0.99],
    "seed": 7,
    "n_devices": 8,
    "n_params": 5,
    "device": "cuda:7",
}
load = pretrained.from_pretrained_no_processing


def toy(seed: int = 0, **names: Any) -> HookedTransformer:
    """A model in which all weights count."""
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, "device": "cpu", **names})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def as_saved(model: HookedTransformer) -> dict[str, Tensor]:
    """The weights with the tables that stand beside them."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in range(model.cfg.n_layers):
        state[f"blocks.{layer}.attn.mask"] = torch.ones(model.cfg.n_ctx, model.cfg.n_ctx, dtype=torch.bool).tril()
        state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-1e5)
    return state


def their_config(cfg: HookedTransformerConfig) -> dict[str, Any]:
    names = (
        "n_layers",
        "d_model",
        "n_heads",
        "d_head",
        "d_mlp",
        "n_ctx",
        "d_vocab",
        "act_fn",
        "attn_only",
        "final_rms",
    )
    shortformer = {"shortformer_pos": cfg.positional_embedding_type == "shortformer"}
    return {
        **{name: getattr(cfg, name) for name in names},
        **OF_THE_TRAINING,
        **shortformer,
        "normalization": cfg.normalization_type,
    }


def write(folder: Path, model: HookedTransformer, file: str = "model_final.pth", **names: Any) -> Path:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    torch.save(as_saved(model), folder / file)
    (folder / "config.json").write_text(json.dumps(their_config(model.cfg) | names))
    return folder


@pytest.fixture
def gelu(tmp_path: Path) -> Path:
    return write(tmp_path / "gelu", toy(**KINDS["gelu"]))


def set_config(folder: Path, **names: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | names))


# ---- the same model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_toy_comes_back(kind: str, tmp_path: Path):
    model = toy(**KINDS[kind])
    back = HookedTransformer.from_pretrained_no_processing(write(tmp_path / "toy", model))
    assert torch.equal(back(TOKENS), model(TOKENS))
    assert_apart(toy(seed=1, **KINDS[kind])(TOKENS), model(TOKENS))
    assert (back.cfg.tree, back.cfg.processed) == (model.cfg.tree, ())
    cfg = back.cfg
    assert (cfg.model_name, cfg.original_architecture, cfg.from_checkpoint, cfg.seed) == ("toy", "neel", False, None)
    assert (cfg.device, cfg.n_devices, cfg.tokenizer_name, back.tokenizer) == ("cpu", 1, None, None)
    assert not back.training
    assert all(parameter.requires_grad for parameter in back.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_folding_is_that_of_the_toy(kind: str, tmp_path: Path):
    model = toy(**KINDS[kind])
    back = HookedTransformer.from_pretrained(str(write(tmp_path, model)))
    expected = model(TOKENS).log_softmax(-1)
    model.load_and_process_state_dict(model.state_dict())
    assert back.cfg.processed == model.cfg.processed
    assert "center_unembed" in back.cfg.processed
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert_close(back(TOKENS).log_softmax(-1), expected)


def test_the_file_may_go(gelu: Path):
    model = load(gelu)
    expected = model(TOKENS)
    (gelu / "model_final.pth").write_bytes(b"gone")
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("file", ["trained.pth", "weights/SoLU_final.pth", "model.safetensors"])
def test_other_names_of_the_file(file: str, tmp_path: Path):
    model = toy(**KINDS["gelu"])
    write(tmp_path, model, file)
    if file.endswith("safetensors"):
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / file)
    assert torch.equal(load(tmp_path)(TOKENS), model(TOKENS))


def test_what_lacks_is_an_identity(tmp_path: Path):
    """Norms and biases may be absent from a file: of all layers, since what one layer lacks was lost."""
    model = toy(**KINDS["gelu"])
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.w.fill_(1), block.ln2.b.zero_()
        model.unembed.b_U.zero_()
    left_out = {"blocks.0.ln2.w", "blocks.0.ln2.b", "blocks.1.ln2.w", "blocks.1.ln2.b", "unembed.b_U"}
    write(tmp_path, model)
    file = tmp_path / "model_final.pth"
    torch.save({k: v for k, v in as_saved(model).items() if k not in left_out}, file)
    assert torch.equal(load(tmp_path)(TOKENS), model(TOKENS))
    for lost in ("blocks.1.ln2.w", "blocks.0.attn.b_O", "ln_final.b", "ln_final.w"):
        torch.save({k: v for k, v in as_saved(model).items() if k != lost}, file)
        with pytest.raises(ValueError, match=rf"model_final\.pth: no '{lost}' in the file, which has the same"):
            load(tmp_path)


# ---- early formats -------------------------------------------------------------------------------------------------------


class MinGPT(nn.Module):
    """A GPT with the names that minGPT gives its weights, written out."""

    def __init__(self, n_layers: int, d_model: int, n_heads: int, n_ctx: int, d_vocab: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.tok_emb, self.pos_emb = nn.Embedding(d_vocab, d_model), nn.Parameter(torch.randn(1, n_ctx, d_model))
        self.blocks = nn.ModuleList(self.block(d_model, n_ctx) for _ in range(n_layers))
        self.ln_f, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, d_vocab, bias=False)

    def block(self, d_model: int, n_ctx: int) -> nn.Module:
        block, block.attn = nn.Module(), nn.Module()
        block.ln1, block.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        for name in ("query", "key", "value", "proj"):
            setattr(block.attn, name, nn.Linear(d_model, d_model))
        block.attn.register_buffer("mask", torch.ones(1, 1, n_ctx, n_ctx).tril())
        block.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        return block

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb[:, : tokens.shape[1]]
        for block in self.blocks:
            x = x + self.attend(block.attn, block.ln1(x))
            x = x + block.mlp(block.ln2(x))
        return self.head(self.ln_f(x))

    def attend(self, attn: Any, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for m in (attn.query, attn.key, attn.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        z = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return attn.proj(z.transpose(1, 2).flatten(-2))


def test_a_mingpt(tmp_path: Path):
    torch.manual_seed(0)
    theirs = MinGPT(2, 24, 3, 12, 30).eval()
    cfg = toy(act_fn="gelu", d_mlp=96).cfg
    (tmp_path / "config.json").write_text(json.dumps(their_config(cfg) | {"architecture": "mingpt"}))
    torch.save(theirs.state_dict(), tmp_path / "final.pth")
    model = load(tmp_path)
    assert model.cfg.original_architecture == "mingpt"
    assert_close(model(TOKENS), theirs(TOKENS))
    whole = pretrained.from_pretrained(tmp_path)(TOKENS)
    assert_close(whole.log_softmax(-1), theirs(TOKENS).log_softmax(-1))


def early(model: HookedTransformer, matrices: bool, positions: bool) -> dict[str, Tensor]:
    """The weights with the names and the orientation of the first SoLU models."""
    state = {}
    for name, value in as_saved(model).items():
        turned = positions if name == "pos_embed.W_pos" else matrices and "W_" in name
        name = name.replace("ln_final.", "norm.").replace(".ln", ".norm")
        state[name] = value.transpose(-2, -1).contiguous() if turned else value
    return state


@pytest.mark.parametrize(
    ("n_layers", "n_ctx", "matrices", "positions"),
    [(2, 12, True, True), (8, 24, False, True), (8, 12, False, True), (10, 12, False, False), (10, 24, False, False)],
)
def test_an_early_solu_model(n_layers: int, n_ctx: int, matrices: bool, positions: bool, tmp_path: Path):
    """The position embedding of 24 positions is square."""
    model = toy(act_fn="solu_ln", d_mlp=96, n_layers=n_layers, n_ctx=n_ctx)
    write(tmp_path, model)
    torch.save(early(model, matrices, positions), tmp_path / "model_final.pth")
    assert torch.equal(load(tmp_path)(TOKENS), model(TOKENS))
    one = load(tmp_path, first_n_layers=1, n_ctx=11)
    assert torch.equal(one.pos_embed.W_pos, model.pos_embed.W_pos)
    assert torch.equal(one.blocks[0].mlp.ln.w, model.blocks[0].mlp.ln.w)


def test_weights_of_today_are_not_taken_for_early_ones():
    model = toy(**KINDS["solu_ln"])
    assert from_early_solu(early(model, True, True), model.cfg).keys() == as_saved(model).keys()


# ---- options -------------------------------------------------------------------------------------------------------------


def test_first_layers_and_n_ctx(gelu: Path):
    whole = toy(**KINDS["gelu"])
    cut = HookedTransformer(replace(whole.cfg, n_layers=1, tree=None))
    cut.load_state_dict({name: value for name, value in whole.state_dict().items() if not name.startswith("blocks.1")})
    model = load(gelu, first_n_layers=1)
    assert (model.cfg.n_layers, len(model.blocks)) == (1, 1)
    assert torch.equal(model(TOKENS), cut(TOKENS))
    with pytest.raises(ValueError, match="2 layers"):
        load(gelu, first_n_layers=3)
    assert load(gelu, n_ctx=11).cfg.n_ctx == 11
    with pytest.raises(ValueError, match="11 tokens"):
        load(gelu, n_ctx=10)(TOKENS)
    with pytest.raises(ValueError, match="embeddings for 12 positions"):
        load(gelu, n_ctx=13)


def test_dtypes(gelu: Path):
    assert load(gelu, dtype=torch.bfloat16).blocks[0].mlp.W_in.dtype == torch.bfloat16
    torch.save({k: v.half() for k, v in toy(**KINDS["gelu"]).state_dict().items()}, gelu / "model_final.pth")
    assert load(gelu, dtype="auto").cfg.dtype == torch.float16
    assert load(gelu).cfg.dtype == load(gelu).W_E.dtype == torch.float32


def test_defaults_and_overrides(gelu: Path):
    model = load(gelu, default_prepend_bos=False, default_padding_side="left", eps=0.5, device="cpu")
    assert (model.cfg.default_prepend_bos, model.cfg.default_padding_side, model.cfg.eps) == (False, "left", 0.5)
    assert torch.equal(model(TOKENS), _with_eps(0.5)(TOKENS))
    set_config(gelu, ln_eps=0.25)
    assert load(gelu).cfg.eps == 0.25


def _with_eps(eps: float) -> HookedTransformer:
    return toy(eps=eps, **KINDS["gelu"])


def test_a_subclass(gelu: Path):
    class Mine(HookedTransformer):
        pass

    assert type(Mine.from_pretrained(gelu)) is Mine
    with pytest.raises(ValueError, match=r"HookedTransformer\.from_pretrained"):
        HookedEncoder.from_pretrained(gelu)


def words(folder: Path) -> PreTrainedTokenizerFast:
    found = Tokenizer(models.WordLevel({"<s>": 0, "the": 1, "cat": 2}, unk_token="<s>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="<s>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_tokenizers(gelu: Path, tmp_path: Path):
    mine = words(tmp_path / "words")
    with pytest.raises(ValueError, match="this model has none"):
        load(gelu).to_tokens("the cat")
    set_config(gelu, tokenizer_name=str(tmp_path / "words"))
    model = load(gelu)
    assert model.to_tokens("the cat").tolist() == [[0, 1, 2]]
    assert (model.cfg.tokenizer_name, model.cfg.d_vocab) == (str(tmp_path / "words"), 30)
    set_config(gelu, tokenizer_name="nobody/nothing")
    with pytest.raises(ValueError, match=r"the tokenizer 'nobody/nothing'.*tokenizer=\.\.\."):
        load(gelu, local_files_only=True)
    assert load(gelu, tokenizer=mine).tokenizer is mine
    words(gelu)
    assert load(gelu).to_tokens("cat").tolist() == [[0, 2]]


# ---- checkpoints of a training run, and the hub ----------------------------------------------------------------------------


LABELS = (9, 80, 1000)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A training run: three checkpoints, whose names do not stand in order, and the end."""
    folder = write(tmp_path / "run", toy(seed=99, **KINDS["gelu"]))
    for label in LABELS:
        write(folder, toy(seed=label, **KINDS["gelu"]), f"checkpoints/gelu_{label}.pth")
    (folder / "checkpoints" / "optimizer_state.pth").write_bytes(b"")
    return folder


def of(label: int) -> Tensor:
    return toy(seed=label, **KINDS["gelu"])(TOKENS)


def test_checkpoints(run: Path):
    assert torch.equal(load(run)(TOKENS), of(99))
    for index, label in enumerate(LABELS):
        assert torch.equal(load(run, checkpoint_value=label)(TOKENS), of(label))
        model = load(run, checkpoint_index=index)
        assert torch.equal(model(TOKENS), of(label))
        cfg = model.cfg
        assert (cfg.from_checkpoint, cfg.checkpoint_index, cfg.checkpoint_value) == (True, index, label)
        assert cfg.checkpoint_label_type == "step"
    assert load(run, checkpoint_index=-1).cfg.checkpoint_index == 2
    assert loading.get_checkpoint_labels(str(run)) == ([9, 80, 1000], "step")


def test_checkpoints_that_are_not_there(run: Path, gelu: Path):
    with pytest.raises(ValueError, match=r"no checkpoint at step 81; the nearest are \[80, 9\]"):
        load(run, checkpoint_value=81)
    with pytest.raises(IndexError, match="there are 3"):
        load(run, checkpoint_index=3)
    with pytest.raises(ValueError, match="not both"):
        load(run, checkpoint_index=1, checkpoint_value=80)
    with pytest.raises(ValueError, match=r"no checkpoints of .*gelu.*checkpoints/\*_<number>\.pth"):
        load(gelu, checkpoint_index=0)


def test_large_labels_count_tokens(run: Path):
    (run / "checkpoints" / "gelu_1000.pth").rename(run / "checkpoints" / "gelu_2000000000.pth")
    assert loading.get_checkpoint_labels(str(run)) == ([9, 80, 2_000_000_000], "token")
    with pytest.raises(ValueError, match="at token 1000"):
        load(run, checkpoint_value=1000)


@pytest.fixture
def repository(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str | None]]:
    """A hub on which every repository is that run; what is fetched is recorded."""
    fetched: list[tuple[str, str, str | None]] = []

    def hf_hub_download(name: str, file: str, revision: str | None = None, **options: Any) -> str:
        fetched.append((name, file, revision))
        cached = tmp_path / "cache" / file
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes((run / file).read_bytes())
        return str(cached)

    def list_repo_files(self: Any, name: str, **options: Any) -> list[str]:
        return [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_repo_files)
    return fetched


def test_the_hub(repository: list[tuple[str, str, str | None]]):
    model = load("gelu-2l")
    assert torch.equal(model(TOKENS), of(99))
    name = "NeelNanda/GELU_2L512W_C4_Code"
    assert repository == [(name, "config.json", None), (name, "model_final.pth", None)]
    assert model.cfg.model_name == "GELU_2L512W_C4_Code"
    repository.clear()
    assert torch.equal(load("somebody/toy", checkpoint_value=80, revision="v2")(TOKENS), of(80))
    assert repository == [("somebody/toy", file, "v2") for file in ("config.json", "checkpoints/gelu_80.pth")]
    assert loading.get_checkpoint_labels("gelu-2l") == ([9, 80, 1000], "step")


def test_the_cache_serves_where_the_hub_does_not_answer(
    repository: list[tuple[str, str, str | None]], monkeypatch: pytest.MonkeyPatch
):
    def dead(self: Any, name: str, **options: Any) -> list[str]:
        raise ConnectionError("no line")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.HfApi.list_repo_files", dead)
        with pytest.raises(ValueError, match=r"did not list the files of 'somebody/toy': no line"):
            load("somebody/toy")
    load("somebody/toy")
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", dead)
    assert torch.equal(load("somebody/toy")(TOKENS), of(99))
    assert torch.equal(load("somebody/toy", local_files_only=True)(TOKENS), of(99))


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": True}, "never run"),
        ({"load_in_8bit": True}, r"load_in_8bit=True is not supported: .* call model\.quantize\('int8'\)"),
        ({"dtype": "int8"}, "int8"),
        ({"use_logn_attn": True}, "use_logn_attn=True is not supported"),
    ],
)
def test_options_that_cannot_be_honoured(gelu: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(gelu, **options)
    with pytest.raises(TypeError, match="has no argument 'load_in_16bit'; did you mean 'load_in_4bit'"):
        load(gelu, load_in_16bit=True)


def test_several_devices(gelu: Path):
    with labelled_devices():
        model = load(gelu, device_map={"": "lazy:0", "blocks.1": "lazy:1"})
        assert {str(weight.device) for weight in model.blocks[1].parameters()} == {"lazy:1"}
        assert_close(values(model(torch.tensor([[1, 2, 3]]))), load(gelu)(torch.tensor([[1, 2, 3]])))


@pytest.mark.parametrize("name", ["n_ctx", "d_vocab", "normalization"])
def test_configs_that_do_not_say_enough(gelu: Path, name: str):
    config = json.loads((gelu / "config.json").read_text())
    del config[name]
    (gelu / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"does not say {name}"):
        load(gelu)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it_ran",)


def test_weights_that_do_not_fit(gelu: Path):
    file = gelu / "model_final.pth"
    state = as_saved(toy(**KINDS["gelu"]))
    torch.save({k: v for k, v in state.items() if k != "blocks.1.attn.W_O"}, file)
    with pytest.raises(ValueError, match=r"no 'blocks\.1\.attn\.W_O'"):
        load(gelu)
    torch.save({**state, "blocks.2.mlp.W_in": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"has no 'blocks\.2\.mlp\.W_in'"):
        load(gelu)
    torch.save({**state, "embed.W_E": RunsCode()}, file)
    with pytest.raises(ValueError, match="refused"):
        load(gelu)
    (gelu / "other.pth").write_bytes(file.read_bytes())
    file.rename(gelu / "one.pth")
    with pytest.raises(ValueError, match=r"should have one file of weights.*it has one\.pth, other\.pth"):
        load(gelu)
    (gelu / "one.pth").unlink(), (gelu / "other.pth").unlink()
    with pytest.raises(ValueError, match="it has none"):
        load(gelu)


def test_what_is_of_this_kind(gelu: Path, tmp_path: Path):
    """A config that names a model type is a transformers one; one without sizes in flat names is none at all."""
    assert find_tl(find(gelu), Options()) is not None
    assert find_tl(find("demo"), Options()) is None
    assert find_tl(find(tmp_path / "nowhere"), Options()) is None
    set_config(gelu, model_type="reformer")
    assert find_tl(find(gelu), Options()) is None
    with pytest.raises(ValueError, match="'reformer' is not supported"):
        load(gelu)


# ---- configs under the names of TransformerLens --------------------------------------------------------------------------


def test_configs_without_weights(run: Path):
    cfg = loading.get_pretrained_model_config(str(run), checkpoint_index=1, first_n_layers=1, device="cpu")
    assert cfg == load(run, checkpoint_index=1, first_n_layers=1).cfg
    folded = loading.get_pretrained_model_config(str(run), fold_ln=True, device="cpu")
    assert folded.normalization_type == "LNPre"
    assert loading.convert_hf_model_config(str(run))["d_mlp"] == 40


def test_transformers_knows_no_such_model(gelu: Path):
    with pytest.raises(ValueError, match="names no model_type: it is not the config of a transformers model"):
        hub.verify(gelu)
    with pytest.raises(ValueError, match="belongs to no HF architecture"):
        load(gelu).to_hf()
    assert pretrained.from_pretrained(gelu).verify(TOKENS).ok


def test_weights_alone(run: Path):
    cfg = loading.get_pretrained_model_config(str(run), checkpoint_value=80, device="cpu")
    state = loading.get_pretrained_state_dict(str(run), cfg)
    model = HookedTransformer(cfg)
    model.load_and_process_state_dict(state, False, False, False, False)
    assert torch.equal(model(TOKENS), of(80))


def test_names():
    assert loading.get_official_model_name("SoLU-1L") == "NeelNanda/SoLU_1L512W_C4_Code"
    assert loading.get_official_model_name("solu-8l-old") == "NeelNanda/SoLU_8L_v21_old"
    assert loading.MODEL_ALIASES["NeelNanda/GELU_1L512W_C4_Code"] == ["gelu-1l", "gelu-1l-new", "gelu-1l-c4-code"]
