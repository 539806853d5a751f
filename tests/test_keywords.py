"""A wrong keyword argument is answered with the right one: by each public function, constructor and method."""

import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import Parameter, isclass, isfunction, signature
from types import ModuleType
from typing import Any

import pytest
import torch

import hooked_lm
from hooked_lm import HookedTransformer, Pairs, analysis, at, hooks
from hooked_lm.keywords import BY_NAME, UnknownKeyword, _answering

MODULES = [value for name in hooked_lm.__all__ if isinstance(value := getattr(hooked_lm, name), ModuleType)]
MODULES += [import_module(f"hooked_lm.{name}") for name in ("analysis.circuits", "interventions.dictionaries")]
MODULES += [hooked_lm, analysis.metrics]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


AT_EACH_SITE = ("hook_if_listening", "is_listening")


def public_callables(module: ModuleType) -> Iterator[tuple[str, Callable[..., object], int]]:
    """The functions of a module, and the constructors and methods of its classes, with how many arguments are bound."""
    for name in module.__all__:
        value = getattr(module, name)
        if isfunction(value) and name not in AT_EACH_SITE and value.__module__.startswith(module.__name__):
            yield name, value, 0
        elif isclass(value) and value.__module__.startswith("hooked_lm") and not issubclass(value, BaseException):
            for base in value.__mro__:
                if base.__module__.startswith("hooked_lm") and vars(base).get("answers_keywords", True):
                    yield from (
                        (
                            f"{name}.{key}",
                            getattr(member, "__func__", member),
                            int(not isinstance(member, staticmethod)),
                        )
                        for key, member in list(vars(base).items())
                        if isfunction(getattr(member, "__func__", member))
                        and (key == "__init__" or (key[0] != "_" and "forward" not in vars(base)))
                    )


def misspelt(name: str) -> Iterator[str]:
    """In the singular or else in the plural, and without a letter in the middle."""
    yield name.removesuffix("s") if name.endswith("s") else f"{name}s"
    if len(name) > 4:
        yield name[: len(name) // 2] + name[len(name) // 2 + 1 :]


def without_answer(name: str, function: Callable[..., object], n_bound: int) -> Iterator[str]:
    """The misspelt keywords which are not answered with the name that is meant."""
    parameters = list(signature(function).parameters.values())[n_bound:]
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return  # which takes any name, and checks it itself, or passes it on
    known = {each.name for each in parameters if each.kind in BY_NAME}
    for meant in known:
        for wrong in {*misspelt(meant)} - known:
            try:
                function(*[None] * n_bound, **{wrong: None})
                found = "no error"
            except TypeError as error:
                found = str(error)
            if f"has no argument '{wrong}'; did you mean" not in found or f"'{meant}'" not in found:
                yield f"{name}({wrong}=): {found}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.every_parameter
def test_a_misspelt_keyword_is_answered_by_everything_public(module: ModuleType) -> None:
    each_once = {function: (name, function, n_bound) for name, function, n_bound in public_callables(module)}
    assert not [line for each in each_once.values() for line in without_answer(*each)]


def answer(call: Callable[[], object]) -> str:
    with pytest.raises(UnknownKeyword) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def test_a_keyword_that_is_passed_on_is_one_of_the_outermost_call(model: HookedTransformer) -> None:
    assert "run_with_hooks has no argument 'fwd_hook'; did you mean 'fwd_hooks'" in answer(
        lambda: model.run_with_hooks("a", fwd_hook=[])
    )
    assert "run_with_cache has no argument 'name_filter'; did you mean 'names_filter'" in answer(
        lambda: model.run_with_cache("a", name_filter="z")
    )
    found = answer(lambda: model.run_with_hooks("a", return_typ="loss"))
    assert "run_with_hooks has no argument 'return_typ'; did you mean 'return_type'" in found  # of the forward pass
    assert "forward has no argument 'return_typ'; did you mean 'return_type'" in answer(
        lambda: model("a", return_typ="loss")
    )
    found = answer(lambda: HookedTransformer.from_pretrained("demo", fold_norm=False))
    assert "from_pretrained has no argument 'fold_norm'; did you mean 'fold_ln'" in found
    net = hooked_lm.wrap(torch.nn.Linear(2, 2))
    found = answer(lambda: net.run_with_hooks(torch.ones(1, 2), fwd_hook=[]))
    assert "run_with_hooks has no argument 'fwd_hook'; did you mean 'fwd_hooks'" in found
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):  # of another's function, as it was
        net.run_with_hooks(torch.ones(1, 2), colour=1)


def test_methods_and_results_answer(model: HookedTransformer) -> None:
    assert "at has no argument 'head'; did you mean 'heads'" in answer(lambda: at("z", 1, head=2))
    assert "scale has no argument 'factr'; did you mean 'factor'" in answer(lambda: at("z", 1).scale(factr=2))
    assert "generate has no argument 'max_new_token'; did you mean 'max_new_tokens'" in answer(
        lambda: model.generate("a", max_new_token=2)
    )
    assert "Pairs has no argument 'answer'; did you mean 'answers'" in answer(lambda: Pairs("a", "b", answer="c"))
    lens = analysis.logit_lens(model, "The capital of France is", k=1)
    assert "did you mean 'path'" in answer(lambda: lens.save(paths="x"))
    assert answer(lambda: analysis.logit_lens(model, "a", colour=1)).endswith(
        "has no argument 'colour'; it takes model, prompts, site, layers, positions, k, answers, lens"
    )


def test_an_argument_by_position_that_must_have_its_name() -> None:
    with pytest.raises(TypeError, match=r"at takes site, layer by position and all else by name, got 3 as well"):
        at("z", 1, 3)


def test_another_type_error_stays_as_it_is() -> None:
    def inner(*, width: int) -> int:
        raise TypeError("a wrong kind of width")

    def outer(width: int = 1, **options: Any) -> int:
        return inner(width=width, **options)

    error = TypeError("of the function itself")

    def fails(x: int) -> None:
        raise error

    with pytest.raises(TypeError, match=r"^a wrong kind of width$"):
        _answering(outer, 0)()
    with pytest.raises(TypeError) as caught:
        _answering(fails, 0)(1)
    assert caught.value is error
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        _answering(fails, 0)()
    with pytest.raises(UnknownKeyword, match="outer has no argument 'widt'; did you mean 'width'") as unknown:
        _answering(outer, 0)(widt=2)
    assert "inner() got an unexpected keyword argument 'widt'" in str(unknown.value.__cause__)


def test_signatures_pickles_and_errors_stay_whole() -> None:
    assert pickle.loads(pickle.dumps(analysis.logit_lens)) is analysis.logit_lens
    assert analysis.logit_lens is import_module("hooked_lm.analysis.reading.lens").logit_lens
    assert list(signature(at).parameters) == ["site", "layer", "positions", "heads", "features", "rows"]
    assert at.__doc__
    assert at.__module__ == "hooked_lm.interventions.site_part"
    error = UnknownKeyword("train", "widht", ("width",))
    assert (
        str(pickle.loads(pickle.dumps(error))) == str(error) == "train has no argument 'widht'; did you mean 'width'?"
    )


def test_what_a_run_calls_at_each_site_is_not_wrapped() -> None:
    for function in (hooks.HookPoint.forward, hooks.HookPoint.active_hooks, hooks.hook_if_listening):
        assert "_answers" not in vars(function)
