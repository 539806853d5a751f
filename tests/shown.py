"""One object of each kind that a notebook shows, on the bundled model. Imports no optional package."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from tempfile import mkdtemp
from typing import Any

import torch

from hooked_lm import (
    Chat,
    FactoredMatrix,
    HookedTransformer,
    HookedTransformerKeyValueCache,
    Pairs,
    VisionInputs,
    analysis,
    interventions,
    planted,
)
from hooked_lm.analysis import circuits
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.harvest import estimate_harvest, harvest
from hooked_lm.hooks import Cache, wrap
from hooked_lm.hub import LoRA
from hooked_lm.interventions import GradientReport, Hooks, Record, Scale, Statistics, Store, TopExamples, dictionaries
from hooked_lm.interventions.dictionaries import ActivationBatches, Normalized, TopK, TrainingConfig, train_on
from hooked_lm.interventions.top_examples import Examples
from hooked_lm.patching import Study
from hooked_lm.reports.circuit import Task
from hooked_lm.results import Scores, Significance

HOSTILE = "<img src=x onerror=alert(1)>"
TEXT = "The capital of France is"


@lru_cache
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


def conversation() -> Chat:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return model().chat([{"role": "user", "content": HOSTILE}], chat_template=template)


def anchors() -> analysis.ThoughtAnchors:
    thinks = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    said = {"role": "assistant", "reasoning_content": f"So. {HOSTILE} left.", "content": HOSTILE}
    messages = [{"role": "user", "content": TEXT}, said]
    chat = model().chat(messages, chat_template=thinks + "{% endif %}{{ m.content }}{% endfor %}")
    return analysis.thought_anchors(model(), chat, n=0)


def scores() -> Scores:
    return Scores(torch.tensor([[0.5, 1.0], [0.0, 2.0]]), {"token": [HOSTILE, "b"]})


def crosscoder() -> dictionaries.Crosscoder:
    return dictionaries.Crosscoder(TopK.Config(d_in=8, d_sae=4, k=2).build(), HOSTILE, {})


def significance() -> Significance:
    return Significance.of(Scores(torch.tensor([[1.0, 2] * 3, [-1.0, 1] * 3]), {"token": [HOSTILE, "b"]}))


def circuit() -> circuits.Circuit:
    graph = Graph.of(model())
    return circuits.Circuit.of(graph, [("input", "m0"), ("input", "logits"), ("m0", "logits")])


def comparison() -> Any:
    graph = Graph.of(model())
    return circuit().compare(circuits.Circuit.of(graph, [("input", "m1"), ("input", "logits")]))


def neurons() -> Any:
    prompts = "Mary and John left, Mary", "Mary and John left, John"
    return circuits.neuron_circuit(model(), *prompts, answers=(" Mary", " John"), n_neurons=5, check=False)


def attribution_graph() -> analysis.AttributionGraph:
    return analysis.attribution_graph(model(), TEXT, max_nodes=8, check=5, control=None, progress=False)


def gradients() -> GradientReport:
    report = GradientReport("blocks.*.hook_resid_post")
    with model().hooks([report]):
        model()(TEXT, return_type="loss").backward()
    return report


def steering() -> interventions.SteeringVectors:
    women, men = ["Mary was ill, so", "Anna slept late because"], ["Tom was ill, so", "Paul slept late because"]
    return interventions.steering_vectors(model(), women, men, layers=[1, 2])


def examples() -> Examples:
    ids = torch.zeros(2, 1, dtype=torch.long)
    return Examples(torch.ones(2, 1), ids, ids, torch.ones(2, 1, 3, dtype=torch.long))


def trained() -> Any:
    rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    return train_on(
        ActivationBatches(rows), TopK.Config(d_in=16, d_sae=32, k=4), TrainingConfig(steps=5, vectors_per_step=50)
    )


def transcoders(across: bool) -> dictionaries.LayerTranscoders:
    sites = [(f"blocks.{layer}.mlp.hook_in", f"blocks.{layer}.hook_mlp_out") for layer in range(2)]
    each = (TopK.Config(8, 16, subtract_b_dec=False, hook_point=a, hook_point_out=b, k=4) for a, b in sites)
    return dictionaries.LayerTranscoders.Config(tuple(each), across).build()


def dictionary_scores(**axes: Any) -> dictionaries.DictionaryScores:
    names = {"figure": ["F1", HOSTILE], **axes}
    values = torch.rand(*(len(labels) for labels in names.values()), 1, generator=torch.Generator().manual_seed(0))
    return dictionaries.DictionaryScores(values, names, random=values / 2, pca=values + 1, headline="F1")


def evaluated() -> dictionaries.DictionaryEvaluation:
    return dictionaries.DictionaryEvaluation(dictionary_scores(), dictionary_scores(label=["a", HOSTILE]))


def after_a_run(hook: Any) -> Any:
    model().run_with_hooks(TEXT, fwd_hooks=[hook])
    return hook


def attributed() -> analysis.Attribution:
    estimated = torch.tensor([[1.0], [2.0], [4.0]])
    return analysis.Attribution(
        estimated, {"layer": [0, 1, 2]}, torch.zeros(1), method="gradient", exact=estimated.sqrt()
    )


def hooks() -> list[tuple[str, Callable[..., Any]]]:
    return [("blocks.0.attn.hook_z", torch.neg), (HOSTILE, print)]


def listed() -> Any:
    with model().hooks([("blocks.*.attn.hook_z", torch.neg), Scale("resid_post", 1, factor=2.0)]):
        return model().list_hooks()


def hooked_point() -> Any:
    point = wrap(torch.nn.Sequential(torch.nn.ReLU())).hook_dict["0"]
    point.add_hook(torch.neg)
    return point


def store() -> Store:
    found = Store(mkdtemp())
    found.start(data=HOSTILE).add("blocks.0.hook_resid_post", {"value": torch.ones(2, 3)}, prompts=["one", HOSTILE])
    return found


def sae() -> TopK:
    return TopK(TopK.Config(d_in=16, d_sae=32, k=4))


@lru_cache
def harvested(data: Any = (TEXT,)) -> Any:
    return harvest(model(), data, "resid_post1", mkdtemp(), progress=False)


@dataclass(frozen=True)
class Result:
    """A result on the bundled model, and why it has no picture."""

    make: Callable[[], Any]
    no_plot: str = ""


@lru_cache
def jacobian_lens() -> analysis.JacobianLens:
    return analysis.fit_jacobian_lens(
        model(), [TEXT, "The capital of Spain is", "Mary left"], layers=[2, 3], held_out=0.5
    )


def rankings() -> analysis.TaskRankings:
    curves = torch.tensor([[0.5, 1.0], [0.1, 1.0]])[..., None] * torch.tensor([2.0, 3.0])
    numbers = {"spearman": [0.9, 0.0], "passes": [3.0, 0.0], "seconds": [0.5, 0.1]}
    baselines = torch.tensor([2.0, 3.0]), torch.zeros(2)
    return analysis.TaskRankings(
        HOSTILE, [HOSTILE, "random"], [0.1, 1.0], curves, 1.5 * curves, *baselines, [[3, 30], [2, 30]], numbers
    )


RESULTS = {
    "Scores": Result(scores),
    "Circuit": Result(circuit),
    "Comparison": Result(comparison),
    "NeuronCircuit": Result(neurons),
    "AttributionGraph": Result(attribution_graph),
    "GraphInterventions": Result(lambda: attribution_graph().agreement),
    "TaskRankings": Result(rankings),
    "Leaderboard": Result(lambda: analysis.Leaderboard([rankings()])),
    "GradientReport": Result(gradients),
    "Attribution": Result(attributed),
    "Statistics": Result(lambda: after_a_run(Statistics(["blocks.1.attn.hook_z"]))),
    "TunedLens": Result(lambda: analysis.TunedLens.identity(model())),
    "JacobianLens": Result(jacobian_lens),
    "LensDecomposition": Result(
        lambda: analysis.lens_decomposition(model(), torch.eye(128)[:2], jacobian_lens(), 2, k=2, n_random=1)
    ),
    "Saliency": Result(lambda: analysis.saliency(model(), TEXT, max_new_tokens=1)),
    "Lens": Result(lambda: analysis.logit_lens(model(), TEXT)),
    "MaxActivating": Result(
        lambda: analysis.max_activating_examples(model(), [TEXT], site=("post", 1), neuron=5, k=2, context=2)
    ),
    "Patchscope": Result(
        lambda: analysis.patchscope(model(), TEXT, "The capital of Spain is", source_layers=[1], max_new_tokens=1)
    ),
    "Verbalization": Result(
        lambda: analysis.verbalize(
            model(), model().W_E[model().to_single_token(" Italy")], TEXT, " France", max_new_tokens=1
        )
    ),
    "ModelComparison": Result(
        lambda: analysis.compare_models(model().untrained(), model().untrained(1), [TEXT], n_positions=2)
    ),
    "Crosscoder": Result(crosscoder),
    "ThoughtAnchors": Result(anchors),
    "SteeringVectors": Result(steering),
    "SteeredTexts": Result(
        lambda: interventions.steered_texts(model(), steering(), TEXT, doses=[0.5], max_new_tokens=3)
    ),
    "TrainedDictionary": Result(trained),
    "DictionaryScores": Result(dictionary_scores),
    "DictionaryEvaluation": Result(evaluated),
    "FeaturesTable": Result(lambda: analysis.features_table(model(), dictionaries.load("demo"), [TEXT], ablate=1)),
    "Examples": Result(examples, no_plot="`max_activating_examples` has the texts that a picture needs"),
}
# What is no result, but shows itself in a notebook.
SHOWN: dict[str, Callable[[], Any]] = {
    "Significance": significance,
    "model": model,
    "config": lambda: model().cfg,
    "cache": lambda: model().run_with_cache(TEXT)[1],
    "Cache": lambda: Cache({HOSTILE: torch.zeros(2, 3)}),
    "WrappedModule": lambda: wrap(torch.nn.Sequential(torch.nn.ReLU())),
    "hook_dict": lambda: model().hook_dict,
    "HookPoint": hooked_point,
    "Verification": lambda: model().verify(),
    "Hook": lambda: next(iter(hooked_point().hooks_by_id().values())),
    "Scope": lambda: model().hooks(hooks()),
    "list_hooks": listed,
    "Hooks": lambda: Hooks([Scale("z", 2, factor=0.5), Record(HOSTILE)]),
    "Alignment": lambda: analysis.BoundlessAlignment(analysis.Location("blocks.0.hook_resid_pre"), width=8),
    "Scale": lambda: Scale("z", 2, factor=0.5),
    "Record": lambda: after_a_run(Record("z", 1)),
    "TopExamples": lambda: after_a_run(TopExamples("post", 1, k=2)),
    "Summary": lambda: after_a_run(Statistics("z", 1))["blocks.1.attn.hook_z"],
    "Store": store,
    "Run": lambda: store().runs()[0],
    "SAE": sae,
    "Normalized": lambda: Normalized(sae(), "layer_norm"),
    "TranscoderSet": lambda: transcoders(False),
    "CrossLayerTranscoder": lambda: transcoders(True),
    "SyntheticFeatures": lambda: dictionaries.synthetic_features(16, 8),
    "ActivationBatches": lambda: ActivationBatches(torch.zeros(3, 4)),
    "LoRA": lambda: LoRA({}, {HOSTILE: torch.zeros(2)}, {}, HOSTILE),
    "PairedActivations": lambda: dictionaries.PairedActivations(model(), model(), [HOSTILE], ("resid_post", 1)),
    "Graph": lambda: Graph.of(model()),
    "FactoredMatrix": lambda: FactoredMatrix(torch.zeros(3, 2), torch.zeros(2, 4)),
    "KeyValueCache": lambda: HookedTransformerKeyValueCache.init_cache(model().cfg),
    "Chat": conversation,
    "VisionInputs": lambda: VisionInputs(torch.tensor([[1, 9]]), {"pixel_values": torch.zeros(1, 3, 4, 8)}),
    "ActivationStore": harvested,
    "Column": lambda: harvested()["resid_post1"],
    "LabelColumn": lambda: harvested(conversation())["labels"],
    "Plan": lambda: harvested().plan,
    "HarvestEstimate": lambda: estimate_harvest(model(), [TEXT], "resid_post1"),
    "Study": lambda: Study({"layer": [0, 1]}, {}),
    "Planted": lambda: planted.load("previous-token"),
    "Pairs": lambda: Pairs(["a"], ["b"], [HOSTILE], ["d"]),
    "CircuitTask": lambda: analysis.CircuitTask(HOSTILE, model(), Pairs(["a", "b"], ["b", "a"], " Mary", " John")),
    "Task": lambda: Task(["a"], ["b"], [HOSTILE], ["d"]),
}
