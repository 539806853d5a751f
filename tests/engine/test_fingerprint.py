"""Only the same study resumes from a checkpoint: anything that changes a result changes the fingerprint."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import metrics
from hooked_lm.engine.fingerprint import Digest, Unknown
from hooked_lm.engine.study import Study
from hooked_lm.patching import Edit
from tests.models.toys import toy

VOCAB, POS = 11, 4
CORRUPTED, CLEAN = torch.randint(VOCAB, (2, 2, POS), generator=torch.Generator().manual_seed(1))
ANSWER = 3


def model() -> HookedTransformer:
    return toy(d_vocab=VOCAB, n_layers=2)


def one_of(metric: Any, **settings: Any) -> dict[str, Any]:
    return {"corrupted": CORRUPTED, "clean": CLEAN, "metric": metric, "positions": [2], **settings}


def reads(token: int) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits[:, -1, token]


def of_token(logits: Tensor, token: int) -> Tensor:
    return logits[:, -1, token]


def global_answer(logits: Tensor) -> Tensor:
    return logits[:, -1, ANSWER]


def by_another(logits: Tensor) -> Tensor:
    return global_answer(logits)


class TracedAccess:
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, logits: Tensor) -> Tensor:
        return logits[:, -1, self.token]

    def doubled(self, logits: Tensor) -> Tensor:
        return 2 * self(logits)


class Probe(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((VOCAB,), size), requires_grad=False)

    def forward(self, logits: Tensor) -> Tensor:
        return logits[:, -1] @ self.weight


def ones(value: float = 1.0, at: int = 5) -> Tensor:
    source = torch.zeros(1, POS, 32)
    source[..., at] = value
    return source


def base(**changes: Any) -> dict[str, Any]:
    return {**one_of(reads(3), replace_with=ones()), **changes}


other_clean = CLEAN.clone()
other_clean[0, 0] = (other_clean[0, 0] + 1) % VOCAB
SAME = metrics.logit(3)
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one number of a tensor, of the same norm": (base(), base(replace_with=ones(at=6))),
    "the last digits of a tensor": (base(), base(replace_with=ones(1.000001))),
    "a lambda's closure": (base(), base(metric=reads(4))),
    "a lambda's code": (one_of(lambda x: x[:, -1, 3]), one_of(lambda x: x[:, -1, 4])),
    "a default": (one_of(lambda x, t=3: x[:, -1, t]), one_of(lambda x, t=4: x[:, -1, t])),
    "a partial": (one_of(functools.partial(of_token, token=3)), one_of(functools.partial(of_token, token=4))),
    "an object": (one_of(TracedAccess(3)), one_of(TracedAccess(4))),
    "a bound method": (one_of(TracedAccess(3).doubled), one_of(TracedAccess(4).doubled)),
    "another method": (one_of(TracedAccess(3).__call__), one_of(TracedAccess(3).doubled)),
    "a metric of the package": (one_of(metrics.logit(3)), one_of(metrics.logit(4))),
    "a reference": (one_of(metrics.kl_divergence(ones(1.0).expand(2, -1, -1)[..., :VOCAB])),
                    one_of(metrics.kl_divergence(ones(2.0).expand(2, -1, -1)[..., :VOCAB]))),
    "an array in a closure": (one_of((lambda a: lambda x: x[:, -1] @ torch.tensor(a))(np.eye(VOCAB, dtype=np.float32)[3])),
                              one_of((lambda a: lambda x: x[:, -1] @ torch.tensor(a))(np.eye(VOCAB, dtype=np.float32)[4]))),
    "a probe": (one_of(Probe(1.0)), one_of(Probe(1.001))),
    "the other run": (one_of(SAME, replace_with="zero"), one_of(SAME, replace_with="zero", clean=other_clean)),
    "the name of a metric": (one_of({"a": SAME}), one_of({"b": SAME})),
    "a tensor beside": (base(sites="z", heads=[0], replace_with=ones()[..., :8]),
                        base(sites="z", heads=[1], replace_with=ones()[..., :8])),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_another_study_does_not_resume_from_the_file(name: str, tmp_path: Path) -> None:
    first, second = PAIRS[name]
    file = tmp_path / "sweep.safetensors"
    found = patching.sweep(model(), **first, resume_file=file, progress=False)
    with pytest.raises(ValueError, match="holds another sweep"):
        patching.sweep(model(), **second, resume_file=file, progress=False)
    again = patching.sweep(model(), **first, resume_file=file, progress=False)
    assert torch.equal(again.values, found.values)
    assert again.cost is not None
    assert again.cost["layer_rows"] == 0, "the same study went on"


def test_another_model_does_not_resume_from_the_file(tmp_path: Path) -> None:
    file, study = tmp_path / "sweep.safetensors", one_of(reads(3))
    patching.sweep(model(), **study, resume_file=file, progress=False)
    other = model()
    other.blocks[1].attn.W_Q.data[0, 0, 0] += 1e-6
    for changed in (other, toy(d_vocab=VOCAB, n_layers=2, act_fn="relu"), toy("parallel", d_vocab=VOCAB, n_layers=2)):
        with pytest.raises(ValueError, match="holds another sweep"):
            patching.sweep(changed, **study, resume_file=file, progress=False)
    hooked = model()
    hooked.add_hook("hook_embed", lambda value, hook: value * 2)
    with pytest.raises(ValueError, match="holds another sweep"):
        patching.sweep(hooked, **study, resume_file=file, progress=False)


def test_globals_of_a_function_count_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for answer in (3, 4, 3):
        monkeypatch.setitem(globals(), "ANSWER", answer)
        seen.append([Digest().of(global_answer), Digest().of(by_another)])
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_functions_of_changes_count(tmp_path: Path) -> None:
    file = tmp_path / "study.safetensors"
    for factor in (1.0, 2.0):
        edit = Edit("blocks.0.hook_resid_pre", (lambda by: lambda value: value * by)(factor), (1,))
        study = Study({"cell": ["one"]}, {(0,): [edit]})
        if factor == 1.0:
            study.carry_out(model(), CORRUPTED, reads(3), resume_file=file, progress=False)
        else:
            with pytest.raises(ValueError, match="holds another sweep"):
                study.carry_out(model(), CORRUPTED, reads(3), resume_file=file, progress=False)


def test_unhashable_metrics_need_a_name(tmp_path: Path) -> None:
    lock, file = threading.Lock(), tmp_path / "sweep.safetensors"

    def metric(logits: Tensor) -> Tensor:
        with lock:
            return logits[:, -1, 3]

    with pytest.raises(ValueError, match=r"holds a _thread.lock.*give the metric a name"):
        patching.sweep(model(), **one_of(metric), resume_file=file, progress=False)
    patching.sweep(model(), **one_of({"locked": metric}), resume_file=file, progress=False)
    again = patching.sweep(model(), **one_of({"locked": metric}), resume_file=file, progress=False)
    assert again.cost is not None
    assert again.cost["layer_rows"] == 0
    with pytest.raises(ValueError, match="holds another sweep"):
        patching.sweep(model(), **one_of({"otherwise": metric}), resume_file=file, progress=False)


def test_the_same_digest_again() -> None:
    """Equal objects have the same digest, also after the model has run."""
    one = model()
    before = Digest().of(one)
    one(CLEAN)
    one.run_with_cache(CLEAN)
    assert Digest().of(one) == before == Digest().of(model())
    for make in (
        lambda: metrics.loss(CLEAN),
        lambda: TracedAccess(3),
        lambda: Probe(1.0),
        lambda: {"a": [1, {2}, (3.0, "b")]},
    ):
        assert Digest().of(make()) == Digest().of(make())
    recursive: list[Any] = [1]
    recursive.append(recursive)
    assert Digest().of(recursive) != Digest().of([1])
    assert Digest().of(torch.eye(3).to_sparse()) == Digest().of(torch.eye(3))
    assert Digest().of(torch.zeros(0)) != Digest().of(torch.zeros(0, 2))
    assert Digest().of(["ab", "c"]) != Digest().of(["a", "bc"])
    with pytest.raises(Unknown):
        Digest().of(value for value in "ab")
