"""Former names of arguments warn with the present ones, and both together are refused."""

import pytest

from hooked_lm import HookedTransformer, patching
from hooked_lm.harvest import harvest
from hooked_lm.renamed import GONE_IN, renamed
from hooked_lm.studies import study_pairs


@renamed(engine="executor", part="shard")
def run(data: str, executor: str = "processes", shard: str | None = None) -> tuple[str, str, str | None]:
    return data, executor, shard


def test_a_former_name_warns_and_means_the_present_one() -> None:
    assert run("a", "ray", "0/2") == ("a", "ray", "0/2")
    with pytest.warns(
        DeprecationWarning, match=f"run: engine= is now executor=; the former name goes in version {GONE_IN}"
    ):
        assert run("a", engine="ray") == ("a", "ray", None)
    with pytest.warns(DeprecationWarning, match="former name") as caught:
        assert run("a", engine="ray", part="1/2") == ("a", "ray", "1/2")
    assert len(caught) == 2
    assert caught[0].filename == __file__, "where it is called"
    with pytest.raises(TypeError, match="engine= is the former name of executor=; give executor= alone"):
        run("a", engine="ray", executor="ray")
    assert run.__name__ == "run"


@pytest.mark.parametrize(
    ("function", "former", "present"),
    [
        (patching.sweep, "checkpoint", "resume_file"),
        (patching.run_each, "checkpoint", "resume_file"),
        (patching.ablate, "checkpoint", "resume_file"),
        (patching.causal_trace, "checkpoint", "resume_file"),
        (patching.attention_knockout, "checkpoint", "resume_file"),
        (patching.path_patch, "checkpoint", "resume_file"),
        (harvest, "part", "shard"),
        (harvest, "engine", "executor"),
        (study_pairs, "part", "shard"),
        (study_pairs, "engine", "executor"),
    ],
)
def test_functions_that_had_another_name(function, former: str, present: str) -> None:
    with pytest.raises(TypeError, match=f"{former}= is the former name of {present}="):
        function(HookedTransformer.from_pretrained("demo"), **{former: None, present: None})
