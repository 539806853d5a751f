"""The lens at the last layer is the model; a tuned lens learns a planted map; both say what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis.reading import lens as lens_module
from hooked_lm.analysis.reading.lens import Lens, logit_lens
from hooked_lm.analysis.reading.tuned_lens import TunedLens, train_tuned_lens
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.demo.experiment import prompt_pairs
from tests.close import assert_close, assert_near, is_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt

PROMPTS = ["The capital of France is", "The capital of Spain is"]
KINDS = ("gpt2", "llama", "gemma2", "olmo2", "gptj", "cohere", "granite", "mixtral", "mamba", "openai-gpt")
FIRST = {case.family: case for case in reversed(DECODER_CASES)}
TEXTS = [pair.clean for pair in prompt_pairs(16)]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def tuned(model: HookedTransformer) -> TunedLens:
    return train_tuned_lens(model, TEXTS, steps=30, seed=3)


def by_hand(model: HookedTransformer, stream: Tensor) -> Tensor:
    """The model's own modules."""
    with torch.no_grad():
        return model.unembed(norm_of(model, "ln_final")(stream).to(model.embed.W_E.dtype))


@pytest.mark.parametrize("family", KINDS)
def test_the_last_layer_says_what_the_model_says(family: str):
    model, tokens = hooked(FIRST[family]), prompt(FIRST[family], batch=2, length=6)
    with torch.no_grad():
        logits = model(tokens)
    site = "normalized_resid_post" if family == "openai-gpt" else "resid_post"
    found = logit_lens(model, tokens, site=site, k=3, answers=torch.tensor([[3, 4], [5, 6]]))
    last = logits.transpose(0, 1)
    best = last.topk(3, -1)
    assert torch.equal(found.tokens[-1], best.indices)
    assert_close(found.logits[-1], best.values)
    assert_close(found.log_probs[-1], last.log_softmax(-1).gather(-1, best.indices))
    own = found.answers.select(metric="logit", layer=model.cfg.n_layers - 1).values  # answer, position, prompt
    assert_close(own[1], torch.stack([last[:, 0, 4], last[:, 1, 6]], -1))
    kl = found.scores.select(metric="kl").values
    assert kl[-1].abs().max() < 1e-4 < kl[0].min()  # and before it says something else


def test_every_number_is_that_of_the_formula(model: HookedTransformer):
    answer = torch.tensor([model.to_single_token(" Paris"), model.to_single_token(" Madrid")])
    found = logit_lens(model, PROMPTS, site="resid_mid", layers=[-3, 0], positions=[-1, 2], answers=answer)
    assert list(found.axes["layer"]) == [1, 0]
    logits, cache = model.run_with_cache(PROMPTS)
    own = logits.log_softmax(-1)
    for i, layer in enumerate([1, 0]):
        said = by_hand(model, cache["resid_mid", layer])
        log_probs = said.log_softmax(-1)
        for j, pos in enumerate([len(logits[0]) - 1, 2]):
            for row in range(2):
                p, q = own[row, pos], log_probs[row, pos]
                kl, entropy = (p.exp() * (p - q)).sum(), -(q.exp() * q).sum()
                rank = (said[row, pos] > said[row, pos, answer[row]]).sum().float()
                numbers = torch.stack([entropy, kl])
                assert_close(found.scores.values[:, i, j, row], numbers.detach())
                of_answer = found.answers.values[:, 0, i, j, row]
                expected = [said[row, pos, answer[row]], q[answer[row]].exp(), q[answer[row]], rank]
                assert_close(of_answer, torch.stack(expected).detach())
                assert torch.equal(found.tokens[i, j, row], q.topk(5).indices)


def test_a_cache_and_small_pieces_give_the_same(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    whole = logit_lens(model, PROMPTS, answers=[[" Paris", " Madrid"]])
    assert list(whole.answers.axes["answer"]) == [" Paris", " Madrid"]
    _, cache = model.run_with_cache(PROMPTS, names_filter="blocks.*.hook_resid_post")
    monkeypatch.setattr(lens_module, "MOST_NUMBERS", 5 * model.cfg.d_vocab)
    pieces = logit_lens(model, cache, answers=[[" Paris", " Madrid"]])
    for part in ("tokens", "logits"):
        assert_close(getattr(pieces, part), getattr(whole, part))
    assert_close(pieces.answers.values, whole.answers.values)
    one = logit_lens(model, model.run_with_cache(PROMPTS[0], remove_batch_dim=True)[1])
    assert_close(one.logits[:, :, 0], whole.logits[:, :, 0])


def test_memory_does_not_grow_with_the_prompt(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    rows = []
    decode = lens_module.decode
    monkeypatch.setattr(lens_module, "MOST_NUMBERS", 4 * model.cfg.d_vocab)
    monkeypatch.setattr(lens_module, "decode", lambda m, stream: rows.append(len(stream)) or decode(m, stream))
    logit_lens(model, torch.randint(model.cfg.d_vocab, (2, 31)), k=1)
    assert max(rows) == 4
    assert sum(rows) == 2 * 31 * (model.cfg.n_layers + 1)


def test_tables_figures_files(model: HookedTransformer, tmp_path: Path):
    found = logit_lens(model, PROMPTS, positions=[1, -1], k=2, answers=" Paris")
    table = found.to_dataframe()
    assert len(table) == 4 * 2 * 2 * 2
    last = table[(table["layer"] == 3) & (table["rank"] == 0)]
    assert last["token"].tolist()[-2:] == [" Paris", " Madrid"]
    assert_close(torch.tensor(table["probability"]), torch.tensor(table["log_probability"]).exp())
    figure = found.plot(prompt=1).data[0]
    assert figure.text[0][1] == "·Madrid"  # the last layer is at the top
    first, second = figure.hovertext[0][1].split("<br>")
    assert first.startswith("·Madrid 0.")
    assert second.startswith("·")
    found.save(tmp_path / "lens.safetensors")
    again = Lens.load(tmp_path / "lens.safetensors")
    assert again.to_dataframe().equals(table)
    assert torch.equal(again.answers.values, found.answers.values)
    assert again.about == found.about
    with pytest.raises(ValueError, match=r"holds type Lens, not TunedLens"):
        TunedLens.load(tmp_path / "lens.safetensors")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"layers": [4]}, IndexError, "layer 4 is out of range"),
        ({"positions": [9]}, IndexError, "position 9 is out of range"),
        ({"layers": None}, ValueError, "not None"),
        ({"k": 0}, ValueError, "k must be from 1"),
        ({"site": "pattern"}, ValueError, "is not a residual stream"),
        ({"site": "resid_nowhere"}, KeyError, "resid_nowhere"),
        ({"answers": 10**6}, ValueError, "out of range"),
        ({"answers": " Parisian days"}, ValueError, "not a single token"),
        ({"answers": torch.tensor([1, 2, 3])}, ValueError, "given for 3 prompts, and there are 2"),
    ],
)
def test_what_is_wrong_is_said(model: HookedTransformer, options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        logit_lens(model, PROMPTS, **options)


def test_wrong_prompts(model: HookedTransformer):
    with pytest.raises(ValueError, match="no prompts"):
        logit_lens(model, [])
    with pytest.raises(ValueError, match="same number of tokens"):
        logit_lens(model, ["The", "The capital of"])
    with pytest.raises(KeyError, match="names_filter"):
        logit_lens(model, model.run_with_cache(PROMPTS, names_filter="hook_embed")[1])


# ---- the tuned lens ----------------------------------------------------------------------------------------


def test_untrained_it_is_the_logit_lens(model: HookedTransformer):
    plain, identity = logit_lens(model, PROMPTS), logit_lens(model, PROMPTS, lens=TunedLens.identity(model))
    assert torch.equal(plain.logits, identity.logits)
    assert torch.equal(plain.scores.values, identity.scores.values)


def test_training_brings_it_nearer_on_prompts_it_has_not_seen(model: HookedTransformer, tuned: TunedLens):
    before, after = tuned.held_out.mean
    assert bool((after[:3] < 0.7 * before[:3]).all())
    assert before[3] < 1e-4
    assert torch.equal(tuned.A[3], torch.zeros_like(tuned.A[3]))  # the last needs none
    losses = tuned.losses.mean
    assert bool((losses[-5:, :3].mean(0) < losses[:5, :3].mean(0)).all())
    curves = tuned.losses.plot()
    assert [curve.name for curve in curves.data] == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert curves.layout.yaxis.title.text == "KL divergence, nats"
    others = [pair.corrupted for pair in prompt_pairs(16)][::5]  # the lens uses what was trained, the same way
    kl = [logit_lens(model, others, lens=lens).scores.select(metric="kl").values.mean() for lens in (None, tuned)]
    assert kl[1] < 0.7 * kl[0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_lens_and_nothing_else_changes(model: HookedTransformer, tuned: TunedLens):
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    asked, state = [weight.requires_grad for weight in model.parameters()], torch.get_rng_state()
    again = train_tuned_lens(model, TEXTS, steps=30, seed=3)
    assert torch.equal(again.A, tuned.A)
    assert torch.equal(again.losses.values, tuned.losses.values)
    assert not torch.equal(train_tuned_lens(model, TEXTS, steps=2, seed=4).losses.values, tuned.losses.values[:2])
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert [weight.requires_grad for weight in model.parameters()] == asked
    assert torch.equal(torch.get_rng_state(), state)


def linear_model(generator: torch.Generator) -> tuple[HookedTransformer, Tensor]:
    """A model whose second block multiplies the stream by I + M, and M: relu(x) - relu(-x) is x."""
    d = 4
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=d, n_heads=1, d_head=2, d_mlp=2 * d, d_vocab=24, n_ctx=8, act_fn="relu", normalization_type=None
    )  # fmt: skip
    model = HookedTransformer(cfg)
    M = 0.7 * torch.randn(d, d, generator=generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            if name in ("embed.W_E", "unembed.W_U"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
        second = model.blocks[1].mlp
        second.W_in.copy_(torch.cat([torch.eye(d), -torch.eye(d)], 1))
        second.W_out.copy_(torch.cat([M, -M], 0))
    return model, M


@pytest.mark.slow
def test_a_planted_map_is_found():
    generator = torch.Generator().manual_seed(0)
    model, M = linear_model(generator)
    tokens = torch.randint(24, (40, 8), generator=generator)
    stream = model.run_with_cache(tokens)[1]
    assert_close(stream["resid_post", 1], stream["resid_post", 0] @ (torch.eye(4) + M))
    lens = train_tuned_lens(model, tokens, steps=200, learning_rate=0.05, batch_size=20)
    before, after = lens.held_out.select(layer=0).mean
    assert after < 1e-4 < 1e-2 < before
    assert_near(lens.A[0], M, 0.1, because="it is trained, not solved for")
    assert lens.b[0].abs().max() < 0.03
    assert (M.abs().max() > 0.3).item()  # zeros would not do


@pytest.mark.parametrize(("share", "held"), [(0.01, 1), (0.5, 2), (0.99, 2)])
def test_some_prompts_are_held_out_and_some_are_not(model: HookedTransformer, share: float, held: int):
    lens = train_tuned_lens(model, TEXTS[:3], steps=1, layers=[2], held_out=share)
    assert (lens.held_out.n_prompts, lens.about["prompts"]) == (held, 3 - held)


def test_padding_of_texts_is_left_out(model: HookedTransformer):
    alone = train_tuned_lens(model, ["The capital of France is", "When Mary and"], steps=1, held_out=0.5, seed=1)
    held = alone.held_out.select(run="before").values
    each = [logit_lens(model, text).scores.select(metric="kl").values[..., 0].mean(1) for text in ("When Mary and",
            "The capital of France is")]  # fmt: skip
    assert any(is_close(held[:, 0], one) for one in each)


@pytest.mark.slow
def test_a_lens_file_holds_everything(tuned: TunedLens, tmp_path: Path):
    tuned.save(tmp_path / "tuned.safetensors")
    again = TunedLens.load(tmp_path / "tuned.safetensors")
    assert torch.equal(again.A, tuned.A)
    assert torch.equal(again.held_out.values, tuned.held_out.values)
    assert (again.layers, again.about, repr(again)) == (tuned.layers, tuned.about, repr(tuned))


def test_a_lens_is_for_one_model_one_site_and_its_layers(model: HookedTransformer, tuned: TunedLens):
    small, _ = linear_model(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="whose d_model is 128; this model's is 4"):
        logit_lens(small, torch.ones(1, 3, dtype=torch.long), lens=tuned)
    with pytest.raises(ValueError, match="'resid_post', not on 'resid_pre'"):
        logit_lens(model, PROMPTS, lens=tuned, site="resid_pre")
    deeper = HookedTransformerConfig(n_layers=5, d_model=128, n_heads=8, d_mlp=8, d_vocab=9, n_ctx=8, act_fn="relu")
    with pytest.raises(ValueError, match="of demo with 4 layers, this model has 5"):
        logit_lens(HookedTransformer(deeper), torch.ones(1, 3, dtype=torch.long), lens=tuned)
    some = train_tuned_lens(model, TEXTS[:4], steps=1, layers=[1])
    with pytest.raises(ValueError, match=r"not trained for layers \[0, 2, 3\]"):
        logit_lens(model, PROMPTS, lens=some)
    assert logit_lens(model, PROMPTS, lens=some, layers=[1]).tokens.shape[0] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"held_out": 1.0}, "share of the prompts"),
        ({"prompts": ["one"]}, "at least 2, not 1"),
        ({"prompts": []}, "at least 2, not 0"),
        ({"prompts": torch.ones(5, dtype=torch.long)}, r"\[prompt, pos\] with some tokens, got \[5\]"),
        ({"site": "pattern"}, "is not a residual stream"),
    ],
)
def test_training_that_makes_no_sense(model: HookedTransformer, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        train_tuned_lens(model, **{"prompts": TEXTS[:3], **options})


@pytest.mark.parametrize(("run", "said"), [(1, r"held-out .* layers \[1, 2\]"), (4, "layer 1 is nan in step 2")])
def test_nothing_half_trained_is_returned(model: HookedTransformer, run: int, said: str):
    calls = []

    def spoil(value: Tensor, hook: Any) -> Tensor | None:
        calls.append(1)
        return value * float("nan") if len(calls) == run else None

    mlps = [("blocks.3.hook_resid_pre", lambda value, hook: value.nan_to_num())]  # the model itself goes on
    with model.hooks([("blocks.1.hook_resid_post", spoil), *mlps]), pytest.raises(FloatingPointError, match=said):
        train_tuned_lens(model, TEXTS, steps=5)


def test_an_interruption_is_not_swallowed(model: HookedTransformer):
    calls = []

    def interrupt(value: Tensor, hook: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with model.hooks([("hook_embed", interrupt)]), pytest.raises(KeyboardInterrupt):
        train_tuned_lens(model, TEXTS, steps=5)
    assert model.list_hooks() == {}


def test_a_lens_is_not_trained_on_letters_nor_in_inference_mode() -> None:
    model = HookedTransformer.from_pretrained("demo")
    with pytest.raises(TypeError, match="several texts"):
        train_tuned_lens(model, "When Mary and John left", steps=1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        train_tuned_lens(model, ["When Mary left", "When John left"], steps=1)
