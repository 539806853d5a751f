"""The two models of a case, what they are asked, and how near their answers have to be.

Tests of one case run together, so the last few models are kept.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from hooked_lm import ActivationCache, pretrained
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.families import CLASSES, family
from hooked_lm.hub.export import exported
from hooked_lm.hub.hf_checkpoint import rename_tensors
from tests.close import GRADIENT, assert_apart, assert_close, is_close, tolerance
from tests.families._case import Case, reference
from tests.rounding import undisturbed

MODERATE = (0.2, 10.0)  # their deviation: a comparison of logits near zero, or far from one, would say nothing


@lru_cache(maxsize=4)
def hooked(case: Case) -> Any:
    """The case's model as we load it; whoever wants to change it takes a copy."""
    return pretrained.from_pretrained_no_processing("tiny", hf_model=reference(case))


def with_tree(model: Any, tree: Any) -> Any:
    """A model of this tree with the weights of another, as many as it has."""
    other = type(model)(type(model.cfg).from_tree(tree, init_weights=False, device="cpu"))
    weights = model.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    return other


def every_block(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """A function that changes fields of every block of a tree."""
    return lambda tree: replace(tree, blocks=tuple(replace(block, **change(block)) for block in tree.blocks))


def assert_past_matters(case: Case) -> None:
    """The logits depend on the states before the last token; otherwise a wrong recurrence could pass."""
    model, tokens = hooked(case), prompt(case)

    def forget(state: Tensor, hook: Any) -> Tensor:
        state[:, :-1] = 0.0
        return state

    forgetful = model.run_with_hooks(tokens, fwd_hooks=[("blocks.*.mixer.hook_state", forget)])
    assert (forgetful - model(tokens))[:, -1].abs().max() > 1e-2


def prompt(case: Case, batch: int = 3, length: int | None = None) -> Tensor:
    """Random token ids."""
    shape = (batch, length or case.n_prompt)
    return torch.randint(hooked(case).cfg.d_vocab, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(case: Case, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What transformers says; rotary embeddings that depend on earlier runs start afresh.

    In double precision it still computes some steps in single precision, which no processor's rounding disturbs.
    """
    theirs = copy.deepcopy(reference(case)).to(dtype)
    with default_dtype(dtype), undisturbed() if dtype is torch.float64 else nullcontext():
        return theirs(tokens).logits


# ---- the runs of a case, which its tests share -----------------------------------------------------------------------


@lru_cache(maxsize=1)
@torch.enable_grad()
def expected(case: Case) -> tuple[Any, Tensor]:
    """A model of transformers, and its logits for the prompt, through which gradients flow."""
    theirs = copy.deepcopy(reference(case))
    return theirs, theirs(prompt(case)).logits


@lru_cache(maxsize=1)
@torch.enable_grad()
def found(case: Case) -> Tensor:
    """Our logits for the prompt, through which gradients flow; nobody listens."""
    return hooked(case)(prompt(case))


@lru_cache(maxsize=1)
@torch.no_grad()
def cached(case: Case) -> tuple[Tensor, ActivationCache]:
    """Our logits for the prompt, and what a bare cache contains."""
    return hooked(case).run_with_cache(prompt(case))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """At least `dtype` for new tensors: some models make numbers on the way that have to fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def outputs(case: Case) -> tuple[Tensor, Tensor]:
    """What our model gives and what that of transformers gives, in fp32, for a model of any class; without padding."""
    theirs, ours, tokens = copy.deepcopy(reference(case)), hooked(case), prompt(case)
    if theirs.config.is_encoder_decoder:
        source, target = tokens.clamp(min=3), (tokens % ours.cfg.d_vocab_out).clamp(min=3)
        return ours(source, target), theirs(source, decoder_input_ids=target).logits
    if (pad := getattr(theirs.config, "pad_token_id", None)) is not None:
        tokens = torch.where(tokens == pad, tokens.max(), tokens)
    found = theirs(tokens)
    if "start_logits" in found:  # of spans
        return ours(tokens), torch.stack([found["start_logits"], found["end_logits"]], -1)
    main = ("logits", "prediction_logits", "last_hidden_state")  # of whichever heads there are
    return ours(tokens), next(found[name] for name in main if name in found)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite if there is a NaN."""
    largest = (a - b).abs().max().item()
    return float("inf") if largest != largest else largest


@torch.no_grad()
def allowed(case: Case, tokens: Tensor) -> float:
    """Three times how far transformers is from itself: from its logits in double precision, and by another path to them."""
    plain, fused = logits_of(case, tokens), copy.deepcopy(reference(case))
    with undisturbed():  # of two roundings the farther: one may be near by chance
        still = logits_of(case, tokens)
    truth = logits_of(case, tokens, torch.float64)
    rounding = max(distance(each.double(), truth) for each in (plain, still))
    try:
        fused.set_attn_implementation("sdpa")
    except ValueError:  # it has no other path
        return 3 * rounding
    return 3 * max(rounding, distance(fused(tokens).logits, plain))


def assert_same_logits(case: Case) -> None:
    """In fp32; where rounding is enlarged, by values that cancel, no farther than transformers is from itself."""
    ours, theirs = found(case).detach(), expected(case)[1].detach()
    assert MODERATE[0] < theirs.std() < MODERATE[1], f"the deviation of the logits is {theirs.std():.2g}"
    if not is_close(ours, theirs):
        assert (apart := distance(ours, theirs)) <= allowed(case, prompt(case)), f"logits differ by {apart:.1e}"


def has_routes(model: Any) -> bool:
    """Whether each token has experts of its own."""
    return any(point.dims[0] == "routed" for point in model.all_points().values())


def judged_on_more_where_few_decide(compare: Callable[[int], None], n_inputs: int) -> None:
    """Errors in bf16 have long tails: where one of so many inputs decides, eight times as many do."""
    try:
        compare(n_inputs)
    except AssertionError:
        compare(8 * n_inputs)


def assert_as_near_the_truth(ours: Tensor, theirs: Tensor, truth: Tensor, routed: bool) -> None:
    """Our outputs in bf16 are not farther off than those of transformers.

    In a mixture of experts rounding sends some tokens to other experts, and which is chance: there the median token counts, and
    those far off are no more than in transformers, within four standard errors.
    """
    found, other = ((logits.double() - truth).pow(2).mean(-1) for logits in (ours, theirs))
    if not routed:
        assert found.mean().sqrt() <= 1.2 * other.mean().sqrt()
        return
    assert found.median().sqrt() <= 1.2 * other.median().sqrt()
    far_off = 16 * other.median()
    more = ((found > far_off).double() - (other > far_off).double()).mean(-1)  # of each prompt
    assert more.mean() <= 4 * more.std() / len(more) ** 0.5


def backpropagate(logits: Tensor) -> None:
    """Of a random weighing of the logits, the same for both models."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float32) / logits[..., 0].numel()
    (logits * weights).sum().backward(retain_graph=True)


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Takes the gradient of every weight that is learned (a table of sines is not) from a model, zero where there is none."""
    learned = {name: x for name, x in model.named_parameters() if x.requires_grad}
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in learned.items()}
    model.zero_grad()
    return gradients


def assert_same_gradients_of(
    ours: Callable[[torch.dtype], Any], theirs: Callable[[torch.dtype], Any], depth: float = GRADIENT
) -> None:
    """For every weight, under the name that transformers gives it: our gradients are exported as if they were weights.

    Both give a model of this dtype after the same backward pass. Some gradients are sums that cancel, as that of a key's bias
    does entirely, so what is rounded has the size of the terms: at least a hundredth of the largest gradient. Where
    single precision is not enough for that, double precision has to be, within the same bounds: transformers computes some
    steps in single precision even then.
    """
    apart = {}
    for dtype in (torch.float32, torch.float64):
        own, other = gradients_by_name(ours(dtype), theirs(dtype))
        terms = 0.01 * max(x.abs().max().item() for x in other.values())
        apart = {
            name: distance(own[name], gradient)
            for name, gradient in other.items()
            if distance(own[name], gradient) > tolerance(own[name], gradient, depth, terms, torch.float32)
        }
        if not apart:
            return
    worst = max(apart, key=lambda name: apart[name])
    raise AssertionError(
        f"gradients of {len(apart)} weights are not close, that of {worst} differs by {apart[worst]:.1e}"
    )


def gradients_by_name(ours: Any, theirs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Our gradients and those of transformers under the same names, taken from both models.

    A composite cannot be written back, nor can identity experts (`longcat_flash.py`): gradients are loaded as if they were
    weights.
    """
    gradients = gradients_of(theirs)
    if ours.cfg.left_out is None and not any(".shortcut." in name for name in ours.all_points()):
        return exported_gradients(ours), under_written_names(theirs, gradients)
    with in_place_of_weights(theirs, gradients):
        loaded = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs, dtype=ours.cfg.dtype)
    return gradients_of(ours), {name: x.detach() for name, x in loaded.named_parameters() if x.requires_grad}


def under_written_names(theirs: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients under the names that files have; of a weight with several names, under the one that is written."""
    tied = {name: source for name, source in (theirs.all_tied_weights_keys or {}).items() if source not in gradients}
    first = {tied.get(name, name): gradient for name, gradient in gradients.items()}
    return dict(rename_tensors(revert_weight_conversion(theirs, first), renamed(theirs.config.model_type)))


def renamed(model_type: str) -> dict[str, str]:
    """What old names of tensors have become; as `rename_tensors` takes it."""
    return getattr(family(model_type, *CLASSES.values()), "RENAMED", {})


def exported_gradients(ours: Any) -> dict[str, Tensor]:
    """Takes the gradients from our model, as it would write them if they were its weights."""
    unread = {name: torch.zeros_like(x) for name, x in ours.named_parameters() if name.endswith("pos_embed.before")}
    with in_place_of_weights(ours, gradients_of(ours) | unread):
        return {name: planned.make().clone() for name, planned in exported(ours)[1].items()}


@contextmanager
def in_place_of_weights(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Until the `with` block ends, these tensors are the learned weights of the model."""
    before = {name: x.data for name, x in model.named_parameters() if name in tensors}
    for name, x in model.named_parameters():
        x.data = tensors.get(name, x.data)
    try:
        yield
    finally:
        for name, x in model.named_parameters():
            x.data = before.get(name, x.data)


def assert_same_gradients(case: Case) -> None:
    def theirs(dtype: torch.dtype) -> Any:
        if dtype is torch.float32:
            model, logits = expected(case)
        else:
            model = copy.deepcopy(reference(case)).to(dtype)
            with default_dtype(dtype):
                logits = model(prompt(case)).logits
        backpropagate(logits)
        return model

    def ours(dtype: torch.dtype) -> Any:
        is_shared = dtype is torch.float32
        model = hooked(case) if is_shared else copy.deepcopy(hooked(case)).to(dtype)
        backpropagate(found(case) if is_shared else model(prompt(case)))
        return model

    assert_same_gradients_of(ours, theirs, GRADIENT * recurrence(case))


def recurrence(case: Case) -> float:
    """How many times the rounding of a layer a state carries from position to position: errors of both signs partly cancel."""
    has_state = any(isinstance(block, MixerPart) for block in hooked(case).blocks)
    return case.n_prompt**0.5 if has_state else 1.0


def sharpness(case: Case, n_pos: int) -> float:
    """How many times larger scores, and their rounding, are where queries grow with their position."""
    scales = [
        getattr(attn.cfg, "position_scale", None)
        for block in hooked(case).blocks
        if (attn := getattr(block, "attn", None))
    ]
    grown = [1 + abs(of.weight) * math.log1p((n_pos + of.offset) // of.length) for of in scales if of is not None]
    return max(grown, default=1.0)


def save_shuffled(weights: dict[str, Tensor], checkpoint: Path, folder: Path) -> None:
    """The checkpoint again, in several files and in no order: parts of one of our weights may lie in different files."""
    names = random.sample(sorted(weights), len(weights))
    home = {name: f"model-{i % 7}.safetensors" for i, name in enumerate(names)}
    for file in set(home.values()):
        save_file({name: weights[name] for name in names if home[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())


def assert_same_files(
    folder: Path, checkpoint: Path, weights: dict[str, Tensor], may_lack: Collection[str] = ()
) -> None:
    """What we wrote into a folder is what the checkpoint contains, but for tensors that follow from the config."""
    written = load_file(folder / "model.safetensors")
    lacks = {name for name in weights.keys() - written.keys() if any(fnmatch(name, glob) for glob in may_lack)}
    assert_same_tensors(written, {name: tensor for name, tensor in weights.items() if name not in lacks})
    found, expected = (json.loads((path / "config.json").read_text()) for path in (folder, checkpoint))
    assert found == expected


def padded(rows: Sequence[Tensor], side: str, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of tokens as one batch, and its mask."""
    longest = max(len(row) for row in rows)
    tokens, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(longest - len(row), None) if side == "left" else slice(len(row))
        tokens[i, span], mask[i, span] = row, 1
    return tokens, mask


@torch.no_grad()
def assert_rows_of_patterns(model: Any, *inputs: Tensor, **masks: Tensor) -> None:
    """Rows of scores and patterns, for which the others are not computed, are those of whole ones; and not of other queries."""
    sites = [name for name, point in model.all_points().items() if point.dims[2:3] == ("query_pos",)]
    sites = [name for name in sites if "pattern" in name or "scores" in name]
    if not sites:  # a model without attention
        return
    _, whole = model.run_with_cache(*inputs, names_filter=sites, **masks)
    _, rows = model.run_with_cache(*inputs, names_filter=sites, pos_slice=[-1, 3], **masks)
    assert rows.keys() == whole.keys()
    for name, value in whole.items():
        assert_close(rows[name], value[:, :, [-1, 3]], msg=name)
        if value.shape[-1] > 1:
            assert_apart(rows[name].flip(2), value[:, :, [-1, 3]])


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and under each the same numbers."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
