"""Requests that the hub refuses because there are too many."""

from types import SimpleNamespace

import pytest
import transformers

from hooked_lm.hub import retries


class TooMany(Exception):
    def __init__(self, status: int = 429, **headers: str) -> None:
        self.response = SimpleNamespace(status_code=status, headers=headers)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited, in seconds."""
    found: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


def test_the_hub_is_asked_again_while_it_is_busy(waits: list[float]) -> None:
    answers = [TooMany(**{"Retry-After": "7.5"}), TooMany(**{"Retry-After": "soon"}), TooMany(), 3]

    def ask(add: int) -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer + add

    assert retries.call_hf_with_retry(ask, 1, max_attempts=4, base_delay=1.0) == 4
    assert waits[0] == 7.5
    assert 1.6 <= waits[1] <= 2.4
    assert 3.2 <= waits[2] <= 4.8
    answers[:] = [TooMany(), TooMany(), 3]
    with pytest.raises(TooMany):
        retries.call_hf_with_retry(ask, 1, max_attempts=2)
    assert answers == [3]


def test_other_errors_are_raised_at_once(waits: list[float]) -> None:
    def refuse(status: int) -> None:
        raise TooMany(status)

    with pytest.raises(TooMany):
        retries.call_hf_with_retry(refuse, 503)
    with pytest.raises(ValueError, match="invalid literal"):
        retries.call_hf_with_retry(int, "x")
    with pytest.raises(ValueError, match="max_attempts must be at least 1, got 0"):
        retries.call_hf_with_retry(int, "1", max_attempts=0)
    assert waits == []


def test_loaders_of_transformers_ask_again(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def busy_once(cls: type, name: str) -> str:
        asked.append(name)
        if len(asked) == 1:
            raise TooMany
        return f"{cls.__name__} of {name}"

    for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", classmethod(busy_once))
    retries.enable_hf_retry()
    first = transformers.AutoConfig.from_pretrained.__func__
    retries.enable_hf_retry()
    assert transformers.AutoConfig.from_pretrained.__func__ is first, "it was wrapped twice"
    assert transformers.AutoConfig.from_pretrained("some") == "AutoConfig of some"
    assert asked == ["some", "some"]
    assert len(waits) == 1
