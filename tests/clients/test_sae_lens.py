"""SAELens's HookedSAETransformer on our models: dictionaries and transcoders attached, edited, differentiated, taken away."""

import copy
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sae_lens
import torch
from sae_lens import HookedSAETransformer
from sae_lens.analysis import hooked_sae_transformer
from safetensors import safe_open
from torch import Tensor
from transformer_lens import ActivationCache, HookedTransformerConfig, patching

from hooked_lm import HookedTransformer
from tests.clients import sae_lens_run
from tests.clients.saes import WIDTH, made, spliced
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import DECODER_CASES, reference

TEXTS = ["The capital of France is Paris", "When Mary and John went to the store, John gave"]
PER_HEAD = {"reshape_activations": "hook_z"}
SITES: dict[str, dict[str, Any]] = {
    "hook_embed": {},
    "blocks.1.hook_resid_pre": {},
    "blocks.3.hook_resid_post": {},
    "blocks.2.hook_attn_out": {},
    "blocks.2.hook_mlp_out": {},
    "blocks.1.attn.hook_z": PER_HEAD,
    "blocks.1.attn.hook_q": {"d_in": 16},
    "blocks.1.attn.hook_v": {"d_in": 16},
    "blocks.1.attn.hook_result": {},
    "blocks.1.hook_mlp_in": {},
    "blocks.1.mlp.hook_in": {},
    "blocks.1.mlp.hook_post": {"d_in": 512},
    "blocks.1.ln2.hook_normalized": {},
    "ln_final.hook_normalized": {},
}
RESID, HEADS, OUT = "blocks.1.hook_resid_pre", "blocks.2.attn.hook_z", "blocks.1.hook_mlp_out"
POST = f"{RESID}.hook_sae_acts_post"
OWN = ["input", "acts_pre", "acts_post", "recons", "output"]


@pytest.fixture(scope="module")
def plain() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture
def model() -> Any:
    return HookedSAETransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def tokens(plain: HookedTransformer) -> Tensor:
    return plain.to_tokens(TEXTS)


def test_everything_is_imported() -> None:
    found = [module.name for module in pkgutil.walk_packages(sae_lens.__path__, "sae_lens.")]
    assert len(found) > 50
    for name in found:
        if not name.endswith("transformer_bridge"):  # for models of another class
            importlib.import_module(name)
    assert all(getattr(sae_lens, name) is not None for name in sae_lens.__all__)
    assert issubclass(HookedSAETransformer, HookedTransformer)
    assert isinstance(made(RESID).hook_sae_input, type(HookedTransformer.from_pretrained("demo").hook_embed))


# ---- attached --------------------------------------------------------------------------------------------------------


def test_at_every_kind_of_site(model: Any, plain: HookedTransformer, tokens: Tensor) -> None:
    """The logits are those of a run with the reconstruction in the site's place, and with the error those of the model."""
    before = plain(tokens)
    for site, options in SITES.items():
        sae = made(site, **options)
        expected = plain.run_with_hooks(tokens, fwd_hooks=[spliced(sae)])
        found = model.run_with_saes(tokens, saes=sae)
        assert_close(found, expected)
        assert_apart(found, before, msg=site)
        with_error = model.run_with_saes(tokens, saes=sae, use_error_term=True)
        assert_close(with_error, before)
        logits, cache = model.run_with_cache_with_saes(tokens, saes=[sae], use_error_term=True)
        value = plain.run_with_cache(tokens, names_filter=site)[1][site]
        assert [name for name in cache if name.startswith(f"{site}.")] == [
            *(f"{site}.hook_sae_{name}" for name in [*OWN[:4], "error", "output"])
        ]
        features = sae.encode(value)
        assert_close(cache[f"{site}.hook_sae_acts_post"], features)
        error = value - sae.decode(features)
        assert_close(cache[f"{site}.hook_sae_error"], error)
        assert_close(logits, before)
        assert torch.equal(model(tokens), before), site
    assert model.acts_to_saes == {}
    assert model.verify().ok


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu", "gated"])
def test_edits_of_features(model: Any, plain: HookedTransformer, tokens: Tensor, architecture: str) -> None:
    """Also of TopK's, which are sparse where nobody looks."""
    options = {"k": 8} if architecture == "topk" else {}
    sae = made(RESID, architecture=architecture, **options)

    def stronger(features: Tensor, hook: Any) -> None:
        features[:, -1, 17] += 5

    def by_hand(value: Tensor, hook: Any) -> Tensor:
        features = sae.encode(value)
        stronger(features, hook)
        return sae.decode(features)

    expected = plain.run_with_hooks(tokens, fwd_hooks=[(RESID, by_hand)])
    found = model.run_with_hooks_with_saes(tokens, saes=sae, fwd_hooks=[(POST, stronger)])
    assert_close(found, expected)
    with model.saes(saes=[sae], use_error_term=True):
        kept = model.run_with_hooks(tokens, fwd_hooks=[(POST, stronger)])
        assert_close(model(tokens), plain(tokens))
    expected = plain.run_with_hooks(tokens, fwd_hooks=[(RESID, lambda v, hook: by_hand(v, hook) + v - sae(v))])
    assert_close(kept, expected)
    assert_apart(kept, plain(tokens))
    assert torch.equal(model(tokens), plain(tokens))


def test_several_at_once_and_one_inside_another(model: Any, plain: HookedTransformer, tokens: Tensor) -> None:
    first, second, third = made(RESID), made(HEADS, **PER_HEAD), made(OUT)
    other = made(RESID, architecture="topk", k=8)

    def expected(*saes: Any) -> Tensor:
        return plain.run_with_hooks(tokens, fwd_hooks=[spliced(sae) for sae in saes])

    assert_close(model.run_with_saes(tokens, saes=[first, second, third]), expected(first, second, third))
    model.add_sae(first)
    assert_close(model(tokens), expected(first))
    with model.saes([second]):
        assert_close(model(tokens), expected(first, second))
        with model.saes([other]):
            assert_close(model(tokens), expected(other, second))
        assert model.acts_to_saes[RESID] is first
        with pytest.raises(IndexError), model.saes([other]):
            model(tokens, start_at_layer=9)
        assert model.acts_to_saes[RESID] is first
        assert_close(model(tokens), expected(first, second))
    assert model.acts_to_saes == {RESID: first}
    assert_close(model(tokens), expected(first))
    model.add_sae(third)
    model.reset_saes(RESID)
    assert_close(model(tokens), expected(third))
    model.reset_saes()
    assert torch.equal(model(tokens), plain(tokens))
    assert_apart(expected(first), expected(other))


@pytest.mark.parametrize("read", ["blocks.1.mlp.hook_in", "blocks.1.ln2.hook_normalized"])
@pytest.mark.parametrize("architecture", ["transcoder", "jumprelu_transcoder"])
def test_transcoders(model: Any, plain: HookedTransformer, tokens: Tensor, architecture: str, read: str) -> None:
    sae = made(read, architecture=architecture, out=OUT, apply_b_dec_to_input=False)
    _, cache = plain.run_with_cache(tokens, names_filter=[read, OUT])
    expected = plain.run_with_hooks(tokens, fwd_hooks=[(OUT, lambda value, hook: sae(cache[read]))])
    assert_close(model.run_with_saes(tokens, saes=sae), expected)
    assert_apart(expected, plain(tokens))
    logits, seen = model.run_with_cache_with_saes(tokens, saes=sae, use_error_term=True)
    assert_close(logits, plain(tokens))
    assert_close(seen[f"{OUT}.hook_sae_error"], cache[OUT] - sae(cache[read]))
    assert torch.equal(model(tokens), plain(tokens))
    assert not model.hook_dict[read].has_hooks()


def test_transcoders_with_a_skip_lose_it(model: Any, plain: HookedTransformer, tokens: Tensor) -> None:
    """A mistake of SAELens: attached, it calls `encode` and `decode` alone, and the way around is in `forward`."""
    read = "blocks.1.mlp.hook_in"
    sae = made(read, architecture="skip_transcoder", out=OUT, apply_b_dec_to_input=False)
    _, cache = plain.run_with_cache(tokens, names_filter=[read])
    around = cache[read] @ sae.W_skip.T
    assert_close(sae(cache[read]), sae.decode(sae.encode(cache[read])) + around)
    expected = plain.run_with_hooks(tokens, fwd_hooks=[(OUT, lambda value, hook: sae(cache[read]) - around)])
    assert_close(model.run_with_saes(tokens, saes=sae), expected)
    assert around.abs().max() > 0.1


def test_tokens_that_are_left_out(model: Any, plain: HookedTransformer) -> None:
    sae, bos = made(RESID), plain.tokenizer.bos_token_id

    def but_first(value: Tensor, hook: Any) -> Tensor:
        return torch.cat([value[:, :1], sae(value[:, 1:])], 1)

    expected = plain.run_with_hooks(TEXTS[0], fwd_hooks=[(RESID, but_first)])
    for chosen in (True, [bos]):
        found = model.run_with_saes(TEXTS[0], saes=sae, exclude_special_tokens=chosen)
        assert_close(found, expected)
    assert_apart(model.run_with_saes(TEXTS[0], saes=sae), expected)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_of_features(model: Any, plain: HookedTransformer, tokens: Tensor) -> None:
    """At features, as a backward hook and a cache with gradients show them; and at the model's own sites before it."""
    sae = made(RESID)
    _, cache = plain.run_with_cache(tokens, names_filter=[RESID, "hook_embed"])
    features = sae.encode(cache[RESID]).detach().requires_grad_()
    error = cache[RESID] - sae(cache[RESID])
    loss = plain.run_with_hooks(
        tokens, return_type="loss", fwd_hooks=[(RESID, lambda value, hook: sae.decode(features) + error)]
    )
    (expected,) = torch.autograd.grad(loss, features)
    seen: dict[str, Tensor] = {}
    with model.saes(sae, use_error_term=True):
        hook = (POST, lambda gradient, hook: seen.update(hooked=gradient))
        model.run_with_hooks(tokens, return_type="loss", bwd_hooks=[hook]).backward()
        _, both = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    assert_close(seen["hooked"], expected)
    assert_close(both[f"{POST}_grad"], expected, depth=GRADIENT)
    assert expected.abs().max() > 1e-4
    embed = cache["hook_embed"].clone().requires_grad_()
    hooks = [("hook_embed", lambda value, hook: embed), (RESID, lambda v, hook: sae(v) + (v - sae(v)).detach())]
    (expected,) = torch.autograd.grad(plain.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks), embed)
    assert_close(both["hook_embed_grad"], expected, depth=GRADIENT)
    whole = plain.run_with_cache(tokens, return_type="loss", incl_bwd=True)[1]["hook_embed_grad"]
    assert_apart(whole, expected)


# ---- caches, generation and sweeps under an attached dictionary ------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the selected positions .* are columns, and padding")
def test_parts_of_a_cache(model: Any, tokens: Tensor) -> None:
    resid, heads = made(RESID), made(HEADS, **PER_HEAD)
    with model.saes([resid, heads]):
        _, whole = model.run_with_cache(tokens)
        _, last = model.run_with_cache(tokens, pos_slice=(-2, None))
    assert isinstance(whole, ActivationCache)
    names = [f"{site}.hook_sae_{name}" for site in (RESID, HEADS) for name in OWN]
    assert [name for name in whole if "hook_sae" in name] == names
    for name in names:
        assert torch.equal(last[name], whole[name][:, -2:]), name
    assert not torch.equal(last[POST], whole[POST][:, :2])
    _, stopped = model.run_with_cache_with_saes(
        tokens[:1], saes=resid, names_filter=[POST], stop_at_layer=2, remove_batch_dim=True, return_cache_object=False
    )
    assert list(stopped) == [POST]
    assert_close(stopped[POST], whole[POST][0])


@pytest.mark.parametrize("error", [False, True])
def test_generation(model: Any, plain: HookedTransformer, error: bool) -> None:
    """With and without the key-value cache, the same tokens as under our hooks, all but the last alike from prompt to end."""
    saes = [made(RESID, architecture="topk", k=8), made(HEADS, **PER_HEAD), made("blocks.2.mlp.hook_in")]
    with torch.no_grad():
        for sae in saes:  # so that the model still speaks
            sae.W_dec.mul_(0.2)
    text = plain.to_tokens(TEXTS[1])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "stop_at_eos": False, "verbose": False}
    with model.saes(saes, use_error_term=error):
        found = [model.generate(text, use_past_kv_cache=cached, **options) for cached in (True, False)]
    hooks = [] if error else [spliced(sae) for sae in saes]
    with plain.hooks(hooks):
        expected = plain.generate(text, use_past_kv_cache=False, **options)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    free = plain.generate(text, **options)
    assert torch.equal(free, expected) == error
    assert torch.equal(model.generate(text, **options), free)


def sweep(model: Any, corrupted: Tensor, clean: Tensor, name: str) -> Tensor:
    _, cache = model.run_with_cache(clean)
    return getattr(patching, name)(model, corrupted, cache, lambda logits: logits[0, -1, 300] - logits[0, -1, 200])


@pytest.mark.filterwarnings("ignore:.* cells run as whole forward passes:UserWarning")  # said so, since they are slow
def test_sweeps_under_it_and_afterwards(model: Any, plain: HookedTransformer) -> None:
    clean, corrupted = plain.to_tokens("Then Mary met John"), plain.to_tokens("Then Anna met John")
    sae = made(HEADS, **PER_HEAD)
    names = ["get_act_patch_resid_pre", "get_act_patch_attn_head_out_all_pos"]
    free = {name: sweep(plain, corrupted, clean, name) for name in names}
    with model.saes(sae), plain.hooks([spliced(sae)]):
        found, expected = (sweep(m, corrupted, clean, names[0]) for m in (model, plain))
    assert_close(found, expected)
    assert_apart(expected, free[names[0]])
    model.run_with_saes(clean, saes=[made(RESID), made("blocks.2.attn.hook_result")])
    for name in names:
        assert_close(sweep(model, corrupted, clean, name), free[name])


@pytest.mark.filterwarnings("ignore:the selected positions .* are columns, and padding")
def test_the_model_is_as_before(model: Any, plain: HookedTransformer, tokens: Tensor) -> None:
    """Keys and values of caches, what is computed on demand, slices by position, and the model's own checks."""
    _, before = model.run_with_cache(tokens)
    others = {f"blocks.{layer}.mlp.hook_in" for layer in range(4)}  # it puts these there
    assert [name for name in before if name not in others] == list(plain.run_with_cache(tokens)[1])
    model.run_with_saes(tokens, saes=[made(site, **options) for site, options in SITES.items()])
    _, after = model.run_with_cache(tokens)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, point in plain.all_points().items():
        mine = model.hook_dict[name]
        assert (mine.dims, mine.on_demand) == (point.dims, point.on_demand and name not in others), name
    _, last = model.run_with_cache(tokens, pos_slice=(-1, None))
    assert all(value.shape[1] == 1 for name, value in last.items() if "pattern" not in name and "scores" not in name)
    assert model.verify().ok
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_an_unknown_site_is_skipped_with_a_warning(
    model: Any, plain: HookedTransformer, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []  # other clients change what is logged in this process, and where
    monkeypatch.setattr(hooked_sae_transformer.logger, "warning", said.append)
    model.add_sae(made("blocks.9.hook_resid_pre"))
    assert ["No hook found for blocks.9.hook_resid_pre" in line for line in said] == [True]
    assert torch.equal(model(tokens), plain(tokens))


# ---- other models ----------------------------------------------------------------------------------------------------


FAMILIES = ["gpt2", "llama", "gemma2", "gpt_neox", "mixtral"]
CASES = [next(case for case in DECODER_CASES if case.family == family) for family in FAMILIES]


def path_of(theirs: Any, layer: int) -> Any:
    inner = getattr(theirs, theirs.base_model_prefix)
    return (inner.h if hasattr(inner, "h") else inner.layers)[layer]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_against_transformers(case: Any) -> None:
    """The same dictionary in a forward hook of PyTorch's, on the block's output and on the MLP's input."""
    theirs = copy.deepcopy(reference(case)).eval()
    model = HookedSAETransformer.from_pretrained_no_processing("tiny", hf_model=theirs)
    tokens = torch.randint(3, model.cfg.d_vocab, (2, 7), generator=torch.Generator().manual_seed(1))
    d_model = model.cfg.d_model
    fired: list[str] = []
    model.run_with_hooks(
        tokens, fwd_hooks=[(lambda n: n.endswith("mlp.hook_in"), lambda v, hook: fired.append(hook.name))]
    )
    assert fired == [f"blocks.{layer}.mlp.hook_in" for layer in range(model.cfg.n_layers)]
    block = path_of(theirs, 0)
    resid, read = made("blocks.0.hook_resid_post", d_model), made("blocks.0.mlp.hook_in", d_model)

    def on_output(module: Any, args: Any, out: Any) -> Any:
        return (resid(out[0]), *out[1:]) if isinstance(out, tuple) else resid(out)

    for sae, register in [
        (resid, lambda: block.register_forward_hook(on_output)),
        (read, lambda: block.mlp.register_forward_pre_hook(lambda module, args: (read(args[0]), *args[1:]))),
    ]:
        handle = register()
        with torch.no_grad():
            expected = theirs(tokens).logits
        handle.remove()
        assert_close(model.run_with_saes(tokens, saes=sae), expected)
        assert_apart(theirs(tokens).logits, expected)


def test_made_from_a_config_or_a_directory(tmp_path: Path) -> None:
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=8, d_head=4, n_heads=4, d_vocab=20, act_fn="gelu", seed=0
    )
    model, plain = HookedSAETransformer(cfg), HookedTransformer(cfg)
    tokens = torch.arange(6)[None]
    assert torch.equal(model(tokens), plain(tokens))
    sae = made("blocks.1.hook_resid_pre", 16)
    expected = plain.run_with_hooks(tokens, fwd_hooks=[spliced(sae)])
    assert_close(model.run_with_saes(tokens, saes=sae), expected)
    assert_apart(expected, plain(tokens))
    attn_only = HookedSAETransformer(HookedTransformerConfig(**{**cfg.to_dict(), "attn_only": True}))
    assert attn_only.run_with_saes(tokens, saes=sae).shape == (1, 6, 20)
    unprocessed = HookedTransformer.from_pretrained_no_processing("demo")
    unprocessed.save_pretrained(tmp_path)
    read = HookedSAETransformer.from_pretrained_no_processing(str(tmp_path))
    text = read.to_tokens(TEXTS[0])
    assert torch.equal(read(text), unprocessed(text))
    sae = made(RESID)
    expected = unprocessed.run_with_hooks(text, fwd_hooks=[spliced(sae)])
    assert_close(read.run_with_saes(text, saes=sae), expected)
    assert sae.W_dec.shape == (WIDTH, 128)


# ---- beside the original ---------------------------------------------------------------------------------------------

ALWAYS = {"unembed.hook_in", "unembed.hook_out"}  # in every cache of theirs; ours keeps what is asked for
# A mistake: the original norms three times a block, and its cache keeps the gradient of the last.
ONE_OF_THREE = ("ln1.hook_normalized_grad", "ln1.hook_scale_grad")


def test_beside_the_original(tmp_path: Path) -> None:
    """The same calls with TransformerLens 3.9.0 in its place, in another process: every value, and the keys in order."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path / "theirs.safetensors"
    subprocess.run([sys.executable, sae_lens_run.__file__, str(original), str(out)], check=True, capture_output=True)
    with safe_open(str(out), "pt") as file:
        names = json.loads(file.metadata()["names"])
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    weights = {
        name.removeprefix("weights: "): theirs.pop(name) for name in list(theirs) if name.startswith("weights: ")
    }
    model = HookedSAETransformer(HookedTransformerConfig(**sae_lens_run.FIELDS))
    model.load_state_dict(weights)
    found, ours = sae_lens_run.everything(model, sae_lens_run.dictionaries(made))
    for run, keys in names.items():
        assert [key for key in keys if key.removesuffix("_grad") not in ALWAYS] == ours[run], run
    theirs = {name: value for name, value in theirs.items() if not name.removesuffix("_grad").endswith(tuple(ALWAYS))}
    assert theirs.keys() == found.keys()
    assert len(found) > 900
    for name, value in found.items():
        if name.endswith(ONE_OF_THREE):
            continue
        assert_close(value, theirs[name], msg=name)
    changed = [f"{kind} error=False" for kind in ("standard", "topk", "heads", "transcoder")]
    for name in changed:
        assert_apart(found[name], found["plain"], name)
