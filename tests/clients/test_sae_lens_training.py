"""SAELens's stores of activations, its runners and its figures, with our model as theirs, on local data."""

from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from sae_lens import (
    SAE,
    ActivationsStore,
    CacheActivationsRunner,
    CacheActivationsRunnerConfig,
    HookedSAETransformer,
    JumpReLUTrainingSAEConfig,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    PretokenizeRunner,
    PretokenizeRunnerConfig,
    StandardTrainingSAEConfig,
    TopKTrainingSAEConfig,
    run_evals,
)
from sae_lens.config import LoggingConfig
from sae_lens.evals import get_eval_everything_config
from sae_lens.load_model import load_model
from sae_lens.multi_sae_training_runner import MultiSAETrainingRunner, MultiSAETrainingRunnerConfig
from sae_lens.training.activation_scaler import ActivationScaler
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo import corpus
from hooked_lm.interventions.dictionaries import evaluate_dictionary
from tests.clients.saes import made
from tests.close import assert_apart, assert_close

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{theirs}:UserWarning:sae_lens.*")
    for theirs in (
        "The training dataset contains fewer samples",
        "Dataset is not tokenized",
        "To copy construct from a tensor",
        "All samples in the training dataset have been exhausted",
        r"\s*This SAE has non-empty model_from_pretrained_kwargs",
    )
]
SITE, HEADS = "blocks.1.hook_mlp_out", "blocks.1.attn.hook_z"
CONTEXT, BOS = 32, 0


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("HookedTransformer", "demo", device="cpu")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = Random(0)
    return [corpus.training_text(draw) for _ in range(400)]


@pytest.fixture(scope="module")
def rows(model: Any, texts: list[str]) -> Tensor:
    """The texts one after another, each behind a BOS, in rows that begin with a BOS."""
    found: list[list[int]] = []
    row: list[int] = []
    for text in texts:
        ids, begins = model.tokenizer.encode(text, add_special_tokens=False), True
        while ids:
            row += [BOS] if begins or not row else []
            n, begins = CONTEXT - len(row), False
            row, ids = row + ids[:n], ids[n:]
            if len(row) == CONTEXT:
                found, row = [*found, row], []
    return torch.tensor(found)


def values(model: Any, tokens: Tensor, site: str) -> Tensor:
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=site)[1][site]


# ---- models and stores -----------------------------------------------------------------------------------------------


def test_models_are_loaded(model: Any, rows: Tensor, tmp_path: Path) -> None:
    """By name, from a directory, and as a transformers model in a root module of theirs, which is a subclass of ours."""
    ours = HookedTransformer.from_pretrained_no_processing("demo")
    expected = ours(rows[:2])
    assert torch.equal(model(rows[:2]), expected)
    ours.save_pretrained(tmp_path)
    assert torch.equal(load_model("HookedTransformer", str(tmp_path), device="cpu")(rows[:2]), expected)
    name = "transformer.h.1.mlp"
    for hook_names in (None, [name]):
        wrapped: Any = load_model("AutoModelForCausalLM", str(tmp_path), device="cpu", hook_names=hook_names)
        logits, cache = wrapped.run_with_cache(rows[:2], names_filter=[name])
        assert_close(logits, expected)
        assert_close(cache[name], values(ours, rows[:2], SITE))
        found = wrapped.run_with_hooks(rows[:2], fwd_hooks=[(name, lambda value, hook: 0 * value)])
        without = ours.run_with_hooks(rows[:2], fwd_hooks=[(SITE, lambda value, hook: 0 * value)])
        assert_close(found, without)
        assert_apart(without, expected)


def store_of(model: Any, data: Dataset, site: str = SITE, d_in: int = 128, **options: Any) -> Any:
    sae = made(site, d_in)
    sae.cfg.metadata.prepend_bos = True
    for name in ("hook_head_index", "seqpos_slice"):
        setattr(sae.cfg.metadata, name, options.pop(name, None))
    return ActivationsStore.from_sae(
        model, sae, data, context_size=CONTEXT, streaming=False, total_tokens=10, **options
    )


def test_tokens_of_texts_and_of_ids(model: Any, texts: list[str], rows: Tensor) -> None:
    store = store_of(model, Dataset.from_dict({"text": texts}))
    assert torch.equal(torch.cat([store.get_batch_tokens(), store.get_batch_tokens(12)]), rows[:20])
    ids = store_of(model, Dataset.from_dict({"input_ids": rows.tolist()}))
    assert torch.equal(ids.get_batch_tokens(6), rows[:6])
    bare = store_of(model, Dataset.from_dict({"text": texts}), sequence_separator_token=None)
    assert not torch.equal(bare.get_batch_tokens(20), rows[:20])


def test_activations(model: Any, rows: Tensor) -> None:
    data, tokens = Dataset.from_dict({"input_ids": rows.tolist()}), rows[:8]
    expected = values(model, tokens, SITE)
    store = store_of(model, data)
    assert torch.equal(store.get_activations(tokens), expected)
    heads = values(model, tokens, HEADS)
    assert torch.equal(store_of(model, data, HEADS).get_activations(tokens), heads.flatten(2))
    one = store_of(model, data, HEADS, d_in=16, hook_head_index=3)
    assert torch.equal(one.get_activations(tokens), heads[:, :, 3])
    assert torch.equal(store_of(model, data, seqpos_slice=(2, -3)).get_activations(tokens), expected[:, 2:-3])
    store.autocast_lm = True
    low = store.get_activations(tokens)
    assert low.isfinite().all()
    assert 1e-4 < ((low - expected).norm() / expected.norm()).item() < 0.05
    store.autocast_lm, store.exclude_special_tokens = False, torch.tensor([BOS])
    kept = expected[tokens != BOS]
    assert_close(store.get_filtered_llm_batch(), kept)
    assert len(kept) < tokens.numel()


def test_batches_for_training_and_their_norm(model: Any, rows: Tensor) -> None:
    """Mixed batches hold the vectors of the rows in another order."""
    n = 16
    store = store_of(
        model, Dataset.from_dict({"input_ids": rows[:n].tolist()}), train_batch_size_tokens=64, n_batches_in_buffer=4
    )
    expected = values(model, rows[:n], SITE).flatten(0, 1)
    seen = torch.cat([next(store) for _ in range(2)])
    distance = torch.cdist(seen, expected, compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.min(1).values.max() < 1e-4
    assert_apart(seen, expected[: len(seen)])
    scaler = ActivationScaler()
    scaler.estimate_scaling_factor(128, iter([expected[:100], expected[100:150]]), 2)
    assert_close(scaler.scaling_factor, 128**0.5 / expected[:150].norm(dim=-1).mean().item())


def test_several_sites_in_one_run(model: Any, rows: Tensor) -> None:
    store = ActivationsStore.from_config_multi_hook(
        model,
        dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        hook_names=[SITE, HEADS],
        hook_d_ins={SITE: 128, HEADS: 16},
        hook_head_indices={HEADS: 5},
        streaming=False,
        context_size=CONTEXT,
    )
    found = store.get_multi_hook_activations(rows[:4])
    assert torch.equal(found[SITE], values(model, rows[:4], SITE))
    assert torch.equal(found[HEADS], values(model, rows[:4], HEADS)[:, :, 5])


# ---- training --------------------------------------------------------------------------------------------------------

WIDTH, STEPS, BATCH = 256, 100, 256
KINDS: dict[str, Any] = {
    "standard": StandardTrainingSAEConfig(
        d_in=128, d_sae=WIDTH, l1_coefficient=0.1, normalize_activations="expected_average_only_in"
    ),
    "topk": TopKTrainingSAEConfig(d_in=128, d_sae=WIDTH, k=24),
    "jumprelu": JumpReLUTrainingSAEConfig(d_in=128, d_sae=WIDTH, l0_coefficient=0.05),
}


def config(sae: Any, path: Path, **options: Any) -> Any:
    return LanguageModelSAERunnerConfig(
        sae=sae,
        model_name="demo",
        hook_name=SITE,
        dataset_path="of this test",
        is_dataset_tokenized=True,
        streaming=False,
        context_size=CONTEXT,
        training_tokens=STEPS * BATCH,
        train_batch_size_tokens=BATCH,
        store_batch_size_prompts=16,
        n_batches_in_buffer=16,
        n_batches_for_norm_estimate=5,
        lr=2e-3,
        checkpoint_path=str(path / "checkpoints"),
        output_path=str(path / "sae"),
        logger=LoggingConfig(log_to_wandb=False),
        **{"verbose": False, **options},
    )


def figures(sae: Any, model: Any, rows: Tensor, without: bool = False) -> dict[str, dict[str, float]]:
    """Theirs, of exactly these rows, with or without special tokens."""
    store = store_of(model, Dataset.from_dict({"input_ids": rows.tolist()}))
    settings = get_eval_everything_config(len(rows), 1, 1)
    return run_evals(sae, store, model, ActivationScaler(), settings, exclude_special_tokens=without)[0]


@pytest.mark.parametrize("head", [None, 3])
def test_figures_of_heads_without_special_tokens(model: Any, rows: Tensor, head: int | None) -> None:
    held, sae = rows[-8:], made(HEADS, 128 if head is None else 16)
    sae.cfg.metadata.hook_head_index = head
    kept = held != BOS

    def put(value: Tensor, by: Any, where: Tensor) -> Tensor:
        part = value.flatten(2) if head is None else value[:, :, head]
        new = torch.where(where[..., None], by(part), part)
        if head is None:
            return new.view_as(value)
        return torch.stack([new if i == head else value[:, :, i] for i in range(value.shape[2])], 2)

    def loss(by: Any = None, where: Tensor = kept) -> float:
        hooks = [] if by is None else [(HEADS, lambda value, hook: put(value, by, where))]
        with torch.no_grad():
            each = model.run_with_hooks(held, return_type="loss", loss_per_token=True, fwd_hooks=hooks)
        return each[kept[:, :-1]].mean().item()

    found = figures(sae, model, held, without=True)["model_performance_preservation"]
    assert_close(found["ce_loss_without_sae"], loss())
    assert_close(found["ce_loss_with_sae"], loss(lambda part: sae.decode(sae.encode(part))))
    everywhere = torch.ones_like(kept)
    assert_close(found["ce_loss_with_ablation"], loss(torch.zeros_like, everywhere))
    assert len({round(value, 3) for value in found.values()}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_training(model: Any, rows: Tensor, kind: str, tmp_path: Path) -> None:
    """What is trained explains held-out vectors, its figures are ours, it is spliced, and read back from its files."""
    data, held = Dataset.from_dict({"input_ids": rows[:-16].tolist()}), rows[-16:]
    prefetched = kind == "topk"  # its runs of the model are another thread's
    cfg = config(KINDS[kind], tmp_path, n_checkpoints=1, prefetch_llm_batches=prefetched)
    runner = LanguageModelSAETrainingRunner(cfg, override_dataset=data, override_model=model)
    untrained = figures(made(SITE), model, held)
    sae = runner.run()
    found = figures(sae, model, held)
    performance, quality = found["model_performance_preservation"], found["reconstruction_quality"]
    assert quality["explained_variance"] > 0.6 > 0 > untrained["reconstruction_quality"]["explained_variance"]
    assert performance["ce_loss_score"] > 0.8 > untrained["model_performance_preservation"]["ce_loss_score"]
    ours = evaluate_dictionary(model, held, sae, site=SITE)
    for name, figure in [
        ("CE", performance["ce_loss_without_sae"]),
        ("CE spliced", performance["ce_loss_with_sae"]),
        ("CE zero-ablated", performance["ce_loss_with_ablation"]),
        ("CE recovered (zero)", performance["ce_loss_score"]),
        ("L0", found["sparsity"]["l0"]),
        ("explained variance", quality["explained_variance"]),
    ]:
        assert_close(ours.select(figure=name).mean.item(), figure, msg=name)
    read = SAE.load_from_disk(tmp_path / "sae")
    attached: Any = HookedSAETransformer.from_pretrained_no_processing("demo")
    loss = attached.run_with_saes(held, saes=read, return_type="loss").item()
    assert_close(loss, performance["ce_loss_with_sae"])
    with torch.no_grad():
        logits, spliced = (m.log_softmax(-1) for m in (model(held), attached.run_with_saes(held, saes=read)))
    divergence = (logits.exp() * (logits - spliced)).sum(-1).mean().item()
    assert_close(found["model_behavior_preservation"]["kl_div_with_sae"], divergence)
    assert_close(attached(held, return_type="loss").item(), performance["ce_loss_without_sae"])
    assert list((tmp_path / "checkpoints").glob("*/*/sae_weights.safetensors"))


def test_training_several_at_once(model: Any, rows: Tensor, tmp_path: Path) -> None:
    """Two sites, three dictionaries, one run of the model for all."""
    cfg = MultiSAETrainingRunnerConfig(
        saes={"mlp": KINDS["topk"], "heads": KINDS["topk"], "mlp jump": KINDS["jumprelu"]},
        hook_names={"mlp": SITE, "heads": HEADS, "mlp jump": SITE},
        model_name="demo",
        dataset_path="of this test",
        streaming=False,
        context_size=CONTEXT,
        training_tokens=60 * BATCH,
        train_batch_size_tokens=BATCH,
        store_batch_size_prompts=16,
        n_batches_in_buffer=16,
        lr=2e-3,
        checkpoint_path=None,
        output_path=str(tmp_path),
        logger=LoggingConfig(log_to_wandb=False),
    )
    data = Dataset.from_dict({"input_ids": rows[:-16].tolist()})
    trained = MultiSAETrainingRunner(cfg, override_dataset=data, override_model=model).run()
    held = rows[-16:]
    for name, sae in trained.items():
        value = values(model, held, cfg.hook_names_per_sae[name]).flatten(2)
        with torch.no_grad():
            made_of, shuffled = sae.decode(sae.encode(value)), value.roll(1, 1)
        variance = (value - value.mean((0, 1))).pow(2).sum()
        assert (made_of - value).pow(2).sum() < 0.5 * variance, name
        assert (shuffled - value).pow(2).sum() > variance


# ---- data kept on disk -----------------------------------------------------------------------------------------------


def test_cached_activations(model: Any, rows: Tensor, tmp_path: Path) -> None:
    """Written once, read as training data in the model's place."""
    n, path = 64, str(tmp_path / "activations")
    cfg = CacheActivationsRunnerConfig(
        dataset_path="of this test",
        model_name="demo",
        model_batch_size=16,
        hook_name=SITE,
        d_in=128,
        training_tokens=n * CONTEXT,
        context_size=CONTEXT,
        new_cached_activations_path=path,
        shuffle=False,
        streaming=False,
        device="cpu",
        buffer_size_gb=n * CONTEXT * 128 * 4 / 1e9,
    )
    kept = CacheActivationsRunner(cfg, override_dataset=Dataset.from_dict({"input_ids": rows.tolist()})).run()
    expected = values(model, rows[:n], SITE)
    found = kept.with_format("torch")
    assert torch.equal(torch.tensor(kept["token_ids"][:]), rows[:n])
    assert_close(torch.stack(list(found[SITE])), expected)
    assert_apart(expected[0], expected[1])
    training = config(
        KINDS["topk"], tmp_path, use_cached_activations=True, cached_activations_path=path, n_eval_batches=1
    )
    data = Dataset.from_dict({"input_ids": rows.tolist()})  # for the figures alone
    runner = LanguageModelSAETrainingRunner(training, override_dataset=data, override_model=model)
    sae = runner.run()
    assert figures(sae, model, rows[-16:])["reconstruction_quality"]["explained_variance"] > 0.4


def test_texts_are_tokenised_beforehand(
    model: Any, texts: list[str], rows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "texts.jsonl"
    Dataset.from_dict({"text": texts}).to_json(source)
    cfg = PretokenizeRunnerConfig(
        tokenizer_name=model.tokenizer.name_or_path,
        dataset_path="json",
        data_files=[str(source)],
        num_proc=1,
        context_size=CONTEXT,
        shuffle=False,
        save_path=str(tmp_path / "tokens"),
    )
    made_of = PretokenizeRunner(cfg).run()
    assert torch.equal(made_of["input_ids"][:], rows)
    store = store_of(model, datasets.load_from_disk(str(tmp_path / "tokens")))
    assert torch.equal(store.get_batch_tokens(10), rows[:10])


# ---- their analysis of token sets ------------------------------------------------------------------------------------


def test_sets_of_tokens(model: Any) -> None:
    """The enrichment of features in sets of tokens, by hand: the largest distance of two cumulative distributions."""
    tsea: Any = pytest.importorskip("sae_lens.tutorial.tsea")
    vocabulary = model.tokenizer.get_vocab()
    capitals = tsea.get_gene_set_from_regex(vocabulary, "Ġ?[A-Z]")
    sets = {"capital": set(capitals), **{letter: tsea.get_letter_gene_sets(vocabulary)[letter] for letter in "ab"}}
    projections = (made(SITE).W_dec @ model.W_U).detach()
    table = tsea.get_enrichment_df(projections, [3, 7], {name: set(ids) for name, ids in sets.items()})
    for feature in (3, 7):
        for name, ids in sets.items():
            order = projections[feature].argsort(descending=True).tolist()
            hits = torch.tensor([token in ids for token in order])
            apart = (hits.cumsum(0) / hits.sum() - (~hits).cumsum(0) / (~hits).sum()).abs().max().item()
            assert_close(table.loc[name, feature], apart)
    assert table.to_numpy().std() > 1e-3
    assert "colors" in tsea.get_test_gene_sets(model)
