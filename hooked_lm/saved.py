"""`load`: any result that the package saved, by the type that its file names."""

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hooked_lm.keywords import answer_keywords
from hooked_lm.results import stored

__all__ = ["load"]

# The type in the header of a file -> what loads such a file.
LOADERS = {
    "Alignment": "hooked_lm.analysis.alignment.alignment:Alignment.load",
    "Attribution": "hooked_lm.analysis.attribution.attribution_result:Attribution.load",
    "AttributionGraph": "hooked_lm.analysis.graphs.graph:AttributionGraph.load",
    "Cache": "hooked_lm.hooks.cache:Cache.load",
    "Chat": "hooked_lm.models.text.chat:Chat.load",
    "ChanceScores": "hooked_lm.analysis.reading.heads:ChanceScores.load",
    "Circuit": "hooked_lm.analysis.circuits.circuit:Circuit.load",
    "CrossLayerTranscoder": "hooked_lm.interventions.dictionaries.transcoder_set:CrossLayerTranscoder.load",
    "Comparison": "hooked_lm.analysis.circuits.compare:Comparison.load",
    "ModelComparison": "hooked_lm.analysis.comparing.model_comparison:ModelComparison.load",
    "NeuronCircuit": "hooked_lm.analysis.circuits.neurons:NeuronCircuit.load",
    "CompositionScores": "hooked_lm.analysis.reading.composition:CompositionScores.load",
    "Crosscoder": "hooked_lm.interventions.dictionaries.crosscoder:Crosscoder.load",
    "DictionaryEvaluation": "hooked_lm.interventions.dictionaries.scores:DictionaryEvaluation.load",
    "DictionaryScores": "hooked_lm.interventions.dictionaries.scores:DictionaryScores.load",
    "Evaluation": "hooked_lm.analysis.circuits.evaluate:Evaluation.load",
    "Examples": "hooked_lm.interventions.top_examples:Examples.load",
    "FeatureReport": "hooked_lm.analysis.reading.feature_report:FeatureReport.load",
    "FeaturesTable": "hooked_lm.analysis.reading.features_table:FeaturesTable.load",
    "GraphInterventions": "hooked_lm.analysis.graphs.agreement:GraphInterventions.load",
    "GradientReport": "hooked_lm.interventions.gradient_report:GradientReport.load",
    "ImageScores": "hooked_lm.analysis.reading.images:ImageScores.load",
    "JacobianLens": "hooked_lm.analysis.reading.jacobian_lens:JacobianLens.load",
    "Leaderboard": "hooked_lm.analysis.rankings.board:Leaderboard.load",
    "Lens": "hooked_lm.analysis.reading.lens:Lens.load",
    "LensDecomposition": "hooked_lm.analysis.reading.lens_decomposition:LensDecomposition.load",
    "MaxActivating": "hooked_lm.analysis.reading.max_activating:MaxActivating.load",
    "MetricScores": "hooked_lm.results.measures:MetricScores.load",
    "Pairs": "hooked_lm.engine.pairs:Pairs.load",
    "Patchscope": "hooked_lm.analysis.reading.patchscopes:Patchscope.load",
    "Probes": "hooked_lm.analysis.probe_results:Probes.load",
    "QKAttribution": "hooked_lm.analysis.graphs.qk:QKAttribution.load",
    "RegressionProbes": "hooked_lm.analysis.probe_results:RegressionProbes.load",
    "Saliency": "hooked_lm.analysis.reading.saliency:Saliency.load",
    "Scores": "hooked_lm.results.scores:Scores.load",
    "Significance": "hooked_lm.results.significance:Significance.load",
    "Statistics": "hooked_lm.interventions.statistics:Statistics.load",
    "SteeringVectors": "hooked_lm.interventions.steering:SteeringVectors.load",
    "SteeredTexts": "hooked_lm.interventions.steered_texts:SteeredTexts.load",
    "SweepResult": "hooked_lm.engine.result:SweepResult.load",
    "TaskRankings": "hooked_lm.analysis.rankings.task_rankings:TaskRankings.load",
    "ThoughtAnchors": "hooked_lm.analysis.thoughts.anchors:ThoughtAnchors.load",
    "SyntheticFeatures": "hooked_lm.interventions.dictionaries.synthetic:SyntheticFeatures.load",
    "TrainedDictionary": "hooked_lm.interventions.dictionaries.train:TrainedDictionary.load",
    "TranscoderSet": "hooked_lm.interventions.dictionaries.transcoder_set:TranscoderSet.load",
    "TunedLens": "hooked_lm.analysis.reading.tuned_lens:TunedLens.load",
    "Verbalization": "hooked_lm.analysis.reading.verbalize:Verbalization.load",
    "dictionary": "hooked_lm.interventions.dictionaries.pretrained:load",
    "interventions": "hooked_lm.interventions:Hooks.load",
}
# The format in the `plan.json` of a folder -> the class that opens the folder.
FOLDERS = {
    "hooked_lm.harvest": "hooked_lm.harvest:ActivationStore",
    "hooked_lm.studies": "hooked_lm.studies:PairTable",
}
PLAN, MODEL = "plan.json", "hooked_lm.json"


def load(path: str | Path) -> Any:
    """Loads any result that `save` wrote, as an object of the type that the file names.

    For results of sweeps and attributions, scores, probes, circuits, lenses, steering vectors, dictionaries, lists of hooks and
    caches; also for the folders of harvests and studies. `Type.load` loads one type only.

    A cache is loaded without its model: `ActivationCache.load(path, model)` gives it the methods that need one. Models are loaded
    with `HookedTransformer.load`, configs with `HookedTransformerConfig.load`.

    Raises ValueError for any other file or folder, with the type that it names, and FileNotFoundError if there is none.

    >>> import tempfile
    >>> import hooked_lm
    >>> model = hooked_lm.HookedTransformer.from_pretrained("demo")
    >>> lens = hooked_lm.analysis.logit_lens(model, "The capital of France is")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lens.save(f"{folder}/lens")
    ...     type(hooked_lm.load(f"{folder}/lens"))
    <class 'hooked_lm.analysis.reading.lens.Lens'>
    """
    if Path(path).is_dir():
        return _of_folder(Path(path))
    kind = stored.kind_of(path)
    if kind not in LOADERS:
        raise ValueError(f"{path} holds type {kind}, which hooked_lm.load cannot load; it loads {', '.join(LOADERS)}")
    return resolve_name(LOADERS[kind])(path)


def _of_folder(folder: Path) -> Any:
    """The harvest or study of a folder."""
    if (folder / MODEL).exists():
        raise ValueError(f"{folder} holds a model: load it with HookedTransformer.load, or the class that it is of")
    if not (folder / PLAN).exists():
        raise ValueError(
            f"{folder} is a folder without {PLAN}, so no harvest and no study: name a file that .save wrote"
        )
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{folder / PLAN} is damaged: it is not JSON ({error})") from None
    format = plan.get("format") if isinstance(plan, dict) else None
    if not isinstance(format, str) or format not in FOLDERS:
        raise ValueError(f"{folder / PLAN} has the format {format!r}; hooked_lm.load knows {', '.join(FOLDERS)}")
    return resolve_name(FOLDERS[format])(folder)


answer_keywords(__name__)
