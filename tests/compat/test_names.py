"""The public names can be imported, checked with isinstance, built from flat configs, converted and folded."""

import importlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig, compat
from hooked_lm.compat import loading, parts
from hooked_lm.compat.processing import ProcessWeights
from hooked_lm.hub.tl_weights import from_early_solu, from_mingpt
from tests.close import assert_apart, assert_close, is_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, reference

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 16,
    "n_ctx": 12,
    "n_heads": 4,
    "d_head": 4,
    "d_mlp": 20,
    "d_vocab": 11,
    "act_fn": "gelu",
    "device": "cpu",
}
T5 = dict(SIZES, act_fn="relu", decoder_start_token_id=0)
GROUPED = dict(SIZES, n_key_value_heads=2, normalization_type="RMS", gated_mlp=True, act_fn="silu")
MIXTURE = dict(GROUPED, num_experts=3, experts_per_token=2)
UNFOLDED = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
TOKENS = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1))


def randomized(module: Any) -> Any:
    """With every weight random, those too that begin as zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return module


def stream(n_pos: int = 6) -> Tensor:
    return torch.randn(2, n_pos, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def shim() -> Iterator[Any]:
    compat.install()
    yield importlib.import_module
    compat.uninstall()


# ---- names ---------------------------------------------------------------------------------------------------------------

IMPORTS = {
    "": "HookedTransformer HookedTransformerConfig HookedEncoder HookedEncoderDecoder HookedRootModule ActivationCache "
    "FactoredMatrix SVDInterpreter BertNextSentencePrediction EasyTransformer EasyTransformerConfig "
    "EasyTransformerKeyValueCache HookedTransformerKeyValueCache TransformerLensKeyValueCache loading components factories "
    "head_detector hook_points patching utils utilities evals train supported_models",
    "HookedTransformer": "HookedRootModule Loss LossPerToken SingleLoss Output DTYPE_FROM_STRING TransformerBlock HookPoint",
    "hook_points": "HookPoint HookedRootModule LensHandle NamesFilter HookFunction DeviceType HookIntrospectionMixin",
    "components": "Attention GroupedQueryAttention LayerNorm LayerNormPre RMSNorm RMSNormPre MLP GatedMLP MoE Embed Unembed "
    "PosEmbed TokenTypeEmbed TransformerBlock BertBlock BertEmbed BertMLMHead BertNSPHead BertPooler T5Attention T5Block",
    "components.mlps.can_be_used_as_mlp": "CanBeUsedAsMLP",
    "config": "HookedTransformerConfig TransformerLensConfig TransformerBridgeConfig",
    "conversion_utils.conversion_steps": "BaseTensorConversion",
    "conversion_utils.conversion_steps.base_tensor_conversion": "BaseTensorConversion",
    "cache.key_value_cache": "TransformerLensKeyValueCache",
    "past_key_value_caching": "HookedTransformerKeyValueCache HookedTransformerKeyValueCacheEntry",
    "factories.mlp_factory": "MLPFactory",
    "loading_from_pretrained": "OFFICIAL_MODEL_NAMES MODEL_ALIASES get_official_model_name get_pretrained_model_config "
    "get_pretrained_state_dict fill_missing_keys convert_gpt2_weights convert_llama_weights get_checkpoint_labels",
    "pretrained.weight_conversions": "convert_neox_weights convert_gemma_weights convert_t5_weights convert_bert_weights",
    "weight_processing": "ProcessWeights",
    "patching": "AxisNames generic_activation_patch get_act_patch_resid_pre layer_pos_patch_setter make_df_from_ranges",
    "head_detector": "HEAD_NAMES HeadName ErrorMeasure LayerToHead detect_head get_supported_heads",
    "SVDInterpreter": "SVDInterpreter OUTPUT_EMBEDDING VECTOR_TYPES",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_names_that_programs_import(shim: Any, module: str) -> None:
    found = shim(f"transformer_lens.{module}".rstrip("."))
    assert not [name for name in IMPORTS[module].split() if not hasattr(found, name)]


def test_they_are_our_classes(shim: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tl = shim("transformer_lens")
    assert tl.EasyTransformer is tl.HookedTransformer is HookedTransformer
    assert tl.EasyTransformerConfig is tl.HookedTransformerConfig is HookedTransformerConfig
    assert tl.loading.get_official_model_name("pythia-70m") == "EleutherAI/pythia-70m"
    assert tl.components.MLP is parts.MLP
    shim("transformer_lens.head_detector").get_supported_heads()
    assert "induction_head" in capsys.readouterr().out


def test_a_conversion_has_a_name_for_each_family_and_is_one_function(shim: Any) -> None:
    conversions = shim("transformer_lens.pretrained.weight_conversions")
    found = {name: value for name, value in vars(conversions).items() if name.startswith("convert_")}
    assert found.pop("convert_mingpt_weights") is from_mingpt  # these are of no transformers models
    assert found.pop("convert_neel_solu_old_weights") is from_early_solu
    assert len(found) >= 23
    assert set(found.values()) == {loading.convert_hf_weights}


# ---- isinstance ----------------------------------------------------------------------------------------------------------


def kinds(module: nn.Module) -> set[str]:
    """The public names that a module is an instance of."""
    return {name for name in parts.__all__ if not name.endswith("Factory") and isinstance(module, getattr(parts, name))}


MODELS: dict[str, Any] = {
    "raw": lambda: HookedTransformer(SIZES),
    "folded": lambda: HookedTransformer(dict(SIZES, normalization_type="LNPre")),
    "rms": lambda: HookedTransformer(GROUPED),
    "rms-folded": lambda: HookedTransformer(dict(GROUPED, normalization_type="RMSPre")),
    "parallel": lambda: HookedTransformer(dict(SIZES, parallel_attn_mlp=True)),
    "attn-only": lambda: HookedTransformer(dict(SIZES, attn_only=True)),
    "mixture": lambda: HookedTransformer(MIXTURE),
    "bert": lambda: HookedEncoder(SIZES),
    "t5": lambda: HookedEncoderDecoder(T5),
}
KINDS = {
    "raw": {
        "embed": "Embed", "pos_embed": "PosEmbed", "blocks.1": "TransformerBlock", "blocks.1.ln1": "LayerNorm",
        "blocks.1.attn": "AbstractAttention Attention", "blocks.1.mlp": "CanBeUsedAsMLP MLP", "unembed": "Unembed",
        "hook_embed": "", "blocks": "",
    },
    "folded": {"blocks.0.ln1": "LayerNormPre", "ln_final": "LayerNormPre"},
    "rms": {
        "blocks.0.ln2": "RMSNorm", "blocks.0.attn": "AbstractAttention GroupedQueryAttention",
        "blocks.0.mlp": "CanBeUsedAsMLP GatedMLP",
    },
    "rms-folded": {"blocks.0.ln2": "RMSNormPre"},
    "parallel": {"blocks.0": "TransformerBlock"},
    "attn-only": {"blocks.0": "TransformerBlock"},
    "mixture": {"blocks.0.mlp": "CanBeUsedAsMLP MoE", "blocks.0.mlp.experts.0": "CanBeUsedAsMLP GatedMLP MoEGatedMLP"},
    "bert": {
        "embed": "BertEmbed", "embed.embed": "Embed", "embed.token_type_embed": "TokenTypeEmbed", "blocks.0": "BertBlock",
        "mlm_head": "BertMLMHead", "pooler": "BertPooler", "nsp_head": "BertNSPHead", "unembed": "Unembed",
    },
    "t5": {
        "encoder.0": "T5Block", "decoder.1": "T5Block", "encoder.0.attn": "AbstractAttention T5Attention",
        "decoder.0.cross_attn": "AbstractAttention T5Attention", "encoder_final_ln": "RMSNorm",
    },
}  # fmt: skip


@pytest.mark.parametrize("model", KINDS)
def test_modules_of_models_are_what_their_names_say(model: str) -> None:
    built = MODELS[model]()
    assert {path: kinds(built.get_submodule(path)) for path in KINDS[model]} == {
        path: {*names.split()} for path, names in KINDS[model].items()
    }


def test_a_subclass_is_an_ordinary_class() -> None:
    class Doubled(parts.MLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    mine, model = Doubled(SIZES), HookedTransformer(SIZES)
    assert isinstance(mine, parts.MLP)
    assert not isinstance(model.blocks[0].mlp, Doubled)
    mine.load_state_dict(model.blocks[1].mlp.state_dict())
    before = model.run_with_cache(TOKENS)[1]["mlp_out", 1]
    model.blocks[1].mlp = mine
    model.setup()
    assert_close(model.run_with_cache(TOKENS)[1]["mlp_out", 1], 2 * before)


def test_a_subclass_has_the_layout_of_its_base() -> None:
    class Mine(parts.TransformerBlock):
        pass

    assert isinstance(Mine(SIZES, 1), parts.TransformerBlock)
    with pytest.raises(ValueError, match="this config describes a ParallelBlock, and Mine is no subclass of it"):
        Mine(dict(SIZES, parallel_attn_mlp=True), 1)


def test_an_mlp_of_ones_own() -> None:
    class Mine(parts.CanBeUsedAsMLP):
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            self.select_activation_function()
            self.W = nn.Linear(cfg["d_model"], self.d_mlp)

        def forward(self, x: Tensor) -> Tensor:
            return self.ln(self.hook_mid(self.act_fn(self.W(x))))[..., : x.shape[-1]]

    mine = Mine(dict(SIZES, act_fn="solu_ln"))
    x = stream()
    pre = mine.W(x)
    assert_close(mine(x), F.layer_norm(pre * pre.softmax(-1), (20,))[..., :16])
    assert isinstance(mine, parts.CanBeUsedAsMLP)
    with pytest.raises(ValueError, match="needs d_mlp"):
        Mine(dict(SIZES, attn_only=True, d_mlp=None, act_fn=None))


# ---- built from a flat config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [SIZES, HookedTransformerConfig(**SIZES)], ids=["dict", "config"])
def test_parts_are_built_with_the_weights_that_they_have_everywhere(cfg: Any) -> None:
    shapes = {
        "LayerNorm": {"w": (16,), "b": (16,)},
        "LayerNormPre": {},
        "RMSNorm": {"w": (16,)},
        "RMSNormPre": {},
        "Embed": {"W_E": (11, 16)},
        "PosEmbed": {"W_pos": (12, 16)},
        "TokenTypeEmbed": {"W_token_type": (2, 16)},
        "Unembed": {"W_U": (16, 11), "b_U": (11,)},
        "MLP": {"W_in": (16, 20), "b_in": (20,), "W_out": (20, 16), "b_out": (16,)},
        "BertPooler": {"W": (16, 16), "b": (16,)},
        "BertNSPHead": {"W": (16, 2), "b": (2,)},
        "BertMLMHead": {"W": (16, 16), "b": (16,), "ln.w": (16,), "ln.b": (16,)},
        "Attention": {f"W_{x}": (4, 16, 4) for x in "QKV"}
        | {f"b_{x}": (4, 4) for x in "QKV"}
        | {"W_O": (4, 4, 16), "b_O": (16,), "mask": (0, 0), "IGNORE": ()},
    }
    for name, expected in shapes.items():
        part = getattr(parts, name)(cfg)
        assert {key: tuple(value.shape) for key, value in part.state_dict().items()} == expected, name
        assert name in kinds(part)
    assert parts.LayerNorm(cfg, 5).w.shape == parts.RMSNorm(cfg, length=5).w.shape == (5,)
    assert parts.MLP({**SIZES, "dtype": "bfloat16"}).W_in.dtype == torch.bfloat16


def test_what_they_compute() -> None:
    x = stream()
    ln, mlp, gated = (randomized(getattr(parts, name)(SIZES)) for name in ("LayerNorm", "MLP", "GatedMLP"))
    assert_close(ln(x), F.layer_norm(x, (16,), ln.w, ln.b))
    assert_close(mlp(x), F.gelu(x @ mlp.W_in + mlp.b_in) @ mlp.W_out + mlp.b_out)
    product = F.gelu(x @ gated.W_gate + gated.b_gate) * (x @ gated.W_in + gated.b_in)
    assert_close(gated(x), product @ gated.W_out + gated.b_out)
    unembed, embed = randomized(parts.Unembed(SIZES)), randomized(parts.Embed(SIZES))
    assert_close(unembed(x), x @ unembed.W_U + unembed.b_U)
    assert_close(embed(TOKENS), embed.W_E[TOKENS])


@pytest.mark.parametrize(
    ("attn_type", "cfg"), [("global", SIZES), ("local", dict(SIZES, window_size=2)), ("global", GROUPED)]
)
def test_attention(attn_type: str, cfg: dict[str, Any]) -> None:
    kind = parts.GroupedQueryAttention if "n_key_value_heads" in cfg else parts.Attention
    attn, x = randomized(kind(cfg, attn_type, 1)), stream()
    q, k, v = (
        torch.einsum("bpm,nmh->bpnh", x, W.repeat_interleave(4 // W.shape[0], 0))
        + b.repeat_interleave(4 // b.shape[0], 0)
        for W, b in ((attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K), (attn.W_V, attn.b_V))
    )
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / 2
    distance = torch.arange(6)[:, None] - torch.arange(6)
    seen = (distance >= 0) & (distance < (2 if attn_type == "local" else 6))
    z = torch.einsum("bnqk,bknh->bqnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    assert_close(attn(x, x, x), torch.einsum("bqnh,nhm->bqm", z, attn.W_O) + attn.b_O)
    with pytest.raises(ValueError, match="'global' or 'local'"):
        kind(cfg, "nearby")


def test_positions_are_counted_for_tokens() -> None:
    pos_embed = randomized(parts.PosEmbed(SIZES))
    assert_close(pos_embed(TOKENS), pos_embed.W_pos[:8].expand(2, 8, 16))
    assert_close(pos_embed(TOKENS[:, :1], past_kv_pos_offset=5), pos_embed.W_pos[5:6].expand(2, 1, 16))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    padded = pos_embed(TOKENS, attention_mask=mask)
    assert_close(padded[0], torch.cat([torch.zeros(2, 16), pos_embed.W_pos[:6]]))
    assert_close(padded[1], pos_embed.W_pos[:8])
    assert_close(pos_embed(TOKENS[:, 7:], 7, mask)[:, 0], pos_embed.W_pos[[5, 7]])


@pytest.mark.parametrize(
    "fields", [{}, {"parallel_attn_mlp": True}, {"attn_only": True}, {"attn_types": ["local", "global"]}]
)
def test_a_model_put_together_from_parts_is_the_model(fields: dict[str, Any]) -> None:
    """As in lessons: embedding, positions, layers, norm and unembedding by hand, with the weights of a whole model."""
    local = {"use_local_attn": True, "window_size": 2} if "attn_types" in fields else {}
    cfg = HookedTransformerConfig(**SIZES, **fields, **local)

    class Lesson(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pos_embed = parts.Embed(cfg), parts.PosEmbed(cfg)
            self.blocks = nn.ModuleList([parts.TransformerBlock(cfg, layer) for layer in range(cfg.n_layers)])
            self.ln_final, self.unembed = parts.LayerNorm(cfg), parts.Unembed(cfg)

        def forward(self, tokens: Tensor) -> Tensor:
            resid = self.embed(tokens) + self.pos_embed(tokens)
            for block in self.blocks:
                resid = block(resid)
            return self.unembed(self.ln_final(resid))

    model, lesson = randomized(HookedTransformer(cfg)), Lesson()
    lesson.load_state_dict(model.state_dict())
    assert_close(lesson(TOKENS), model(TOKENS))


def test_parts_of_encoders() -> None:
    model = randomized(HookedEncoder(SIZES))
    embed, block = parts.BertEmbed(model.cfg), parts.BertBlock(model.cfg)
    embed.load_state_dict(model.embed.state_dict())
    block.load_state_dict(model.blocks[0].state_dict())
    _, cache = model.run_with_cache(TOKENS)
    assert_close(block(embed(TOKENS)), cache["blocks.0.hook_normalized_resid_post"])
    sentences = embed(TOKENS, torch.ones_like(TOKENS))
    assert_apart(sentences, embed(TOKENS), msg="types of tokens do nothing")


def test_parts_of_encoder_decoders() -> None:
    model = HookedEncoderDecoder(T5)
    for is_decoder, layers in ((False, model.encoder), (True, model.decoder)):
        block = parts.T5Block(model.cfg, 1, is_decoder)
        assert type(block) is type(layers[1])
        assert block.state_dict().keys() == layers[1].state_dict().keys()
    attn, x = parts.T5Attention(T5, has_relative_attention_bias=True, is_decoder=True), stream()
    randomized(attn)
    ahead = torch.cat([x[:, :3], x[:, 3:] + 1], 1)
    assert_close(attn(x, x, x)[:, :3], attn(ahead, ahead, ahead)[:, :3])
    assert "T5Attention" in kinds(attn)


def test_factories_and_mixtures() -> None:
    names = {"MLP": SIZES, "GatedMLP": GROUPED, "MoE": MIXTURE}
    for name, cfg in names.items():
        assert name in kinds(parts.MLPFactory.create_mlp(cfg))
    assert parts.ActivationFunctionFactory.pick_activation_function(SIZES) is F.gelu
    moe = randomized(parts.MoE(MIXTURE))
    assert moe(stream()).shape == (2, 6, 16)
    assert "GptOssMoE" in kinds(parts.GptOssMoE(MIXTURE))
    for needs_numbers in (parts.MoE, parts.GptOssMoE):
        with pytest.raises(ValueError, match="needs num_experts and experts_per_token"):
            needs_numbers(SIZES)
    with pytest.raises(ValueError, match="needs n_key_value_heads"):
        parts.GroupedQueryAttention(SIZES)
    with pytest.raises(ValueError, match="no layer 2"):
        parts.TransformerBlock(SIZES, 2)


def test_parts_are_pickled() -> None:
    for part in (parts.PosEmbed(SIZES), parts.MLP(SIZES), parts.BertEmbed(SIZES)):
        assert type(pickle.loads(pickle.dumps(part))) is type(part)


# ---- names of models, configs, weights -----------------------------------------------------------------------------------


def test_every_alias_leads_to_an_official_name() -> None:
    names = loading.make_model_alias_map()
    assert {*names.values()} == {*loading.OFFICIAL_MODEL_NAMES}
    for official, aliases in loading.MODEL_ALIASES.items():
        assert {names[alias] for alias in aliases} <= {official}
    for listed in (loading.OFFICIAL_MODEL_NAMES, [*loading.MODEL_ALIASES]):
        assert listed == sorted(listed, key=str.casefold)
    assert len(loading.DEFAULT_MODEL_ALIASES) == len(loading.OFFICIAL_MODEL_NAMES)
    for given, official in {
        "gpt2-small": "gpt2", "GPT2": "gpt2", "openai-community/gpt2": "gpt2", "pythia-1.3b": "EleutherAI/pythia-1.4b",
        "tiny-stories-33M": "roneneldan/TinyStories-33M", "Somebody/Tuned": "Somebody/Tuned",
    }.items():  # fmt: skip
        assert loading.get_official_model_name(given) == official
    with pytest.raises(ValueError, match="'gpt17' is not a known short name"):
        loading.get_official_model_name("gpt17")


def test_checkpoints_of_training_runs() -> None:
    assert loading.get_checkpoint_labels("pythia-70m") == (loading.PYTHIA_CHECKPOINTS, "step")
    assert loading.get_checkpoint_labels("pythia-70m-v0") == (loading.PYTHIA_V0_CHECKPOINTS, "step")
    assert loading.get_checkpoint_labels("stanford-gpt2-small-a") == (loading.STANFORD_CRFM_CHECKPOINTS, "step")
    assert (len(loading.PYTHIA_CHECKPOINTS), len(loading.PYTHIA_V0_CHECKPOINTS)) == (154, 143)
    with pytest.raises(ValueError, match="no checkpoints of 'gpt2'"):
        loading.get_checkpoint_labels("gpt2")


def test_configs_of_checkpoints() -> None:
    cfg = loading.get_pretrained_model_config(
        "demo", device="cpu", default_prepend_bos=False, first_n_layers=2, n_ctx=10
    )
    assert (cfg.n_layers, cfg.n_ctx, cfg.default_prepend_bos, cfg.device, cfg.init_weights) == (
        2,
        10,
        False,
        "cpu",
        False,
    )
    whole = HookedTransformer.from_pretrained_no_processing("demo").cfg
    assert loading.get_num_params_of_pretrained("demo") == whole.n_params
    named = loading.convert_hf_model_config("demo")
    assert {
        name: named[name] for name in ("d_model", "n_heads", "act_fn", "d_vocab", "eps", "original_architecture")
    } == {
        name: getattr(whole, name)
        for name in ("d_model", "n_heads", "act_fn", "d_vocab", "eps", "original_architecture")
    }
    basic = loading.get_basic_config("demo")
    assert (basic.d_model, basic.n_layers, basic.debug) == (128, 4, True)
    assert loading.get_pretrained_model_config("demo", {"vocab_size": 77}).d_vocab == 77


def test_a_config_and_weights_make_the_model() -> None:
    cfg = loading.get_pretrained_model_config("demo", device="cpu")
    weights = loading.get_pretrained_state_dict("demo", cfg)
    model = HookedTransformer(cfg)
    model.load_and_process_state_dict(weights)
    tokens = TOKENS
    assert_close(model(tokens), HookedTransformer.from_pretrained("demo")(tokens))
    folded = loading.get_pretrained_model_config("demo", fold_ln=True, device="cpu")
    assert (folded.normalization_type, folded.device) == ("LNPre", "cpu")
    empty = HookedTransformer(folded)
    empty.load_state_dict(model.state_dict())
    assert_close(empty(tokens), model(tokens))
    assert loading.get_pretrained_state_dict("demo", cfg, dtype=torch.float16)["embed.W_E"].dtype == torch.float16


def test_missing_keys_are_filled_unless_they_are_matrices() -> None:
    model = randomized(HookedTransformer(SIZES))
    given = {name: value for name, value in model.state_dict().items() if not name.endswith((".b", "b_U"))}
    assert loading.fill_missing_keys(model, given).keys() == model.state_dict().keys()
    assert given["unembed.b_U"].equal(model.unembed.b_U)
    del given["unembed.b_U"], given["blocks.0.mlp.W_in"]
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.W_in"):
        loading.fill_missing_keys(model, given)
    assert "unembed.b_U" not in given


FAMILIES = ["gpt2", "gpt_neox", "gptj", "llama", "qwen2", "gemma", "gemma2", "mixtral", "gpt_oss", "opt", "bloom", "cohere",
            "granite", "olmo", "phi3", "mamba"]  # fmt: skip
CASES = {family: [case for case in DECODER_CASES if case.family == family] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_public_names_make_the_model_again(family: str, tmp_path: Path) -> None:
    case = next((c for c in CASES[family] if "biased" in c.name), CASES[family][0])
    theirs, ours = reference(case), hooked(case)
    theirs.save_pretrained(tmp_path)
    cfg = loading.get_pretrained_model_config(str(tmp_path), device="cpu")
    weights = loading.convert_hf_weights(theirs, cfg)
    model = HookedTransformer(cfg)
    model.load_and_process_state_dict(weights, **UNFOLDED)
    tokens = TOKENS.clamp(max=cfg.d_vocab - 1)
    assert_close(model(tokens), ours(tokens))
    processed = ProcessWeights.process_weights(weights, cfg)
    model.load_and_process_state_dict(processed, **UNFOLDED)
    assert_close(model(tokens).log_softmax(-1), ours(tokens).log_softmax(-1))


def test_what_public_weights_mean() -> None:
    """Offsets of norms and scales of embeddings have gone into them, and absent biases are zeros."""
    case = CASES["gemma2"][0]
    theirs, ours = reference(case), hooked(case)
    weights = loading.convert_hf_weights(theirs, SimpleNamespace(n_key_value_heads=2, n_layers=1, n_ctx=40))
    assert_close(weights["ln_final.w"], theirs.model.norm.weight + 1)
    width = ours.cfg.d_model
    assert_close(weights["embed.W_E"], theirs.model.embed_tokens.weight * width**0.5)
    assert weights["unembed.W_U"].data_ptr() == theirs.lm_head.weight.data_ptr(), "a copy was made"
    assert {name for name in weights if name.startswith("blocks.0.attn.") and not name.endswith(".w")} == {
        f"blocks.0.attn.{name}" for name in ("W_Q", "_W_K", "_W_V", "W_O", "b_Q", "_b_K", "_b_V", "b_O")
    }
    assert not weights["unembed.b_U"].any()
    assert not [name for name in weights if name.startswith("blocks.1.")]
    per_head = loading.convert_hf_weights(theirs, SimpleNamespace(n_key_value_heads=None, n_layers=2, n_ctx=40))
    assert "blocks.1.attn.W_K" in per_head


# ---- rewrites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("fold_layer_norm", {"ln1.w", "ln1.b", "attn.W_Q", "attn.b_Q", "mlp.W_in", "unembed.W_U"}),
        ("center_writing_weights", {"embed.W_E", "attn.W_O", "mlp.b_out"}),
        ("center_unembed", {"unembed.W_U", "unembed.b_U"}),
        ("fold_value_biases", {"attn.b_V", "attn.b_O"}),
        ("refactor_factored_attn_matrices", {"attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O"}),
    ],
)
def test_each_rewrite_of_a_dictionary(name: str, changed: set[str]) -> None:
    cfg = HookedTransformerConfig(**SIZES)
    model = randomized(HookedTransformer(cfg))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    after = getattr(ProcessWeights, name)(before, cfg)
    assert after.keys() == before.keys()
    assert all(value.equal(model.state_dict()[key]) for key, value in before.items()), "the dictionary was edited"
    different = {key for key in before if not is_close(after[key], before[key])}
    assert {key for key in changed if not any(key in found for found in different)} == set()
    again = HookedTransformer(cfg)
    again.load_state_dict(after)
    assert_close(again(TOKENS).log_softmax(-1), model(TOKENS).log_softmax(-1))


@pytest.mark.parametrize("flags", [{"fold_biases": False}, {"center_weights": False}])
def test_less_folding_predicts_the_same(flags: dict[str, bool]) -> None:
    cfg = HookedTransformerConfig(**SIZES)
    model, again = randomized(HookedTransformer(cfg)), HookedTransformer(cfg)
    before = model.state_dict()
    again.load_state_dict(ProcessWeights.fold_layer_norm(before, cfg, **flags))
    assert_close(again(TOKENS), model(TOKENS))
    zero = before | {"blocks.0.ln1.w": torch.zeros(16)}
    with pytest.raises(ValueError, match="weight of zero"):
        ProcessWeights.fold_layer_norm(zero, cfg, fold_biases=False)


def test_dictionaries_with_more_or_less_than_the_model() -> None:
    """More parts are returned as they are; matrices that a rewrite needs may not be absent."""
    cfg = HookedTransformerConfig(**SIZES)
    before = randomized(HookedTransformer(cfg)).state_dict()
    attn_only = replace(cfg, attn_only=True, tree=None)
    after = ProcessWeights.fold_layer_norm(before, attn_only)
    assert after["blocks.0.ln2.w"] is before["blocks.0.ln2.w"]
    assert after["blocks.0.mlp.W_in"] is before["blocks.0.mlp.W_in"]
    rms = replace(cfg, normalization_type="RMS", tree=None)
    assert ProcessWeights.process_weights(before, rms)["blocks.0.ln1.b"] is before["blocks.0.ln1.b"]
    unread = ("embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_O", "blocks.0.mlp.W_out")
    less = {name: value for name, value in before.items() if name not in unread}
    folded, expected = (ProcessWeights.fold_layer_norm(weights, cfg) for weights in (less, before))
    assert not {*unread} & folded.keys()
    for name, value in folded.items():
        assert_close(value, expected[name])
    for rewrite in (ProcessWeights.center_writing_weights, ProcessWeights.fold_value_biases):
        with pytest.raises(ValueError, match="lacks"):
            rewrite(less, cfg)
    with pytest.raises(ValueError, match="W_q"):
        ProcessWeights.fold_layer_norm(before | {"blocks.0.attn.W_q": before["blocks.0.attn.W_Q"]}, cfg)


def test_folding_of_single_tensors() -> None:
    """The steps for one layer give what the rewrite of all gives."""
    cfg = HookedTransformerConfig(**SIZES)
    before = randomized(HookedTransformer(cfg)).state_dict()
    after = ProcessWeights.fold_layer_norm(before, cfg)
    found = ProcessWeights.extract_attention_tensors_for_folding(before, cfg, 1)
    weights, biases = ([found[kind + name] for name in "qkv"] for kind in "wb")
    new_biases = ProcessWeights.fold_layer_norm_biases(*weights, *biases, found["ln1_b"])
    without = ProcessWeights.fold_layer_norm_biases(*weights, None, None, None, found["ln1_b"])
    new_weights = ProcessWeights.center_attention_weights(
        *ProcessWeights.fold_layer_norm_weights(*weights, found["ln1_w"])
    )
    for i, name in enumerate("QKV"):
        assert_close(new_weights[i], after[f"blocks.1.attn.W_{name}"])
        assert_close(new_biases[i], after[f"blocks.1.attn.b_{name}"])
        assert_close(without[i], new_biases[i] - biases[i])


def test_folding_by_formula() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    before = randomized(HookedTransformer(cfg)).state_dict()
    after = ProcessWeights.fold_layer_norm(before, cfg)
    w, b, W = before["blocks.0.ln2.w"], before["blocks.0.ln2.b"], before["blocks.0.mlp.W_in"]
    assert_close(after["blocks.0.mlp.b_in"], before["blocks.0.mlp.b_in"] + b @ W)
    folded = W * w[:, None]
    assert_close(after["blocks.0.mlp.W_in"], folded - folded.mean(0))
    assert after["blocks.0.ln2.w"].equal(torch.ones(16))
    assert not after["blocks.0.ln2.b"].any()
    with_mean = ProcessWeights.fold_layer_norm(before, cfg, center_weights=False)
    assert_close(with_mean["blocks.0.mlp.W_in"], folded)
    with_biases = ProcessWeights.fold_layer_norm(before, cfg, fold_biases=False)
    assert_close(with_biases["blocks.0.mlp.W_in"], folded)
    assert with_biases["blocks.0.mlp.b_in"].equal(before["blocks.0.mlp.b_in"])
    assert with_biases["blocks.0.ln2.w"].equal(torch.ones(16))
    assert_close(with_biases["blocks.0.ln2.b"], b / w)
    rms = replace(cfg, normalization_type="RMS", tree=None)
    weights = randomized(HookedTransformer(rms)).state_dict()
    without = ProcessWeights.fold_layer_norm(weights, rms, fold_biases=False, center_weights=False)
    assert_close(without["unembed.W_U"], weights["unembed.W_U"] * weights["ln_final.w"][:, None])
