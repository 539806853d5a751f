"""Every component that reads or writes the stream states its identities and its weights."""

import inspect

import pytest
from torch import nn

from hooked_lm.components import verification
from hooked_lm.components.blocks.block import AttentionPart, MLPPart
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.per_layer import PerLayerEmbed
from hooked_lm.components.vision.projector import MLPProjector
from hooked_lm.families.decoders.deepseek_v4.hash_moe import RepeatedIds
from hooked_lm.families.decoders.zamba.shared import RepeatedEmbed
from hooked_lm.families.encoders.mobilebert.narrow import Bottleneck
from hooked_lm.families.encoders.mobilebert.trigram import TrigramEmbed
from tests.components.modules import modules

# Modules whose identities are those of the component or the model that contains them.
INSIDE_OTHERS = {
    "AltUp",
    "BoxEmbed",
    "CausalConvolution",
    "ConcatenatedEncoderEmbed",
    "ContactHead",
    "DifferenceNorm",
    "Embed",
    "EncoderEmbed",
    "ExtraEmbed",
    "FactoredEmbed",
    "FactoredUnembed",
    "FairseqSinusoidalEmbed",
    "FixedPosEmbed",
    "GatedRMSNorm",
    "GaussianTopK",
    "GlobalTokens",
    "HeadLayerNorm",
    "HeadScaleNorm",
    "HyperConnection",
    "ImagePosEmbed",
    "BucketPosEmbed",
    "Indexer",
    "LayerScale",
    "JointLayerNorm",
    "KeyPool",
    "LayerNorm",
    "LowRankGatedNorm",
    "MaskScaledEncoderEmbed",
    "MergedRMSNorm",
    "NoNorm",
    "PatchEmbed",
    "PoolIndexer",
    "NgramEmbed",
    "PosEmbed",
    "ProjectedEncoderEmbed",
    "RMSNorm",
    "RelativeBias",
    "RelativeEmbed",
    "ReplacedEmbed",
    "RotaryTable",
    "ShiftedScale",
    "SinusoidalEmbed",
    "SplitStreams",
    "SplitUnembed",
    "StoredRotary",
    "StreamGate",
    "StreamMixer",
    "TableEmbed",
    "TableEncoderEmbed",
    "TokenTypeEmbed",
    "TransformedUnembed",
    "TrigramEncoderEmbed",
    "Unembed",
    "XIELU",
    "TransientGlobalBias",
}


def components() -> list[type[nn.Module]]:
    """Every component that a config of its own builds, also those of families."""
    found = set()
    for module in modules():
        classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module)]
        for kind in classes:
            config = vars(kind).get("Config")
            if kind.__module__ == module.__name__ and hasattr(config, "build") and not inspect.isabstract(config):
                found.add(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def is_stated(function: object, kind: type) -> bool:
    return function.dispatch(kind) is not function.dispatch(object)  # type: ignore[attr-defined]


def test_every_component_has_identities() -> None:
    without = {kind.__name__ for kind in components() if not is_stated(verification.identities, kind)}
    assert without == INSIDE_OTHERS


def test_every_sublayer_states_its_output_and_its_weights() -> None:
    """A sublayer is what has identities, and is neither a block nor a head nor in front of them."""
    heads = ("hooked_lm.components.heads", "hooked_lm.components.vision.")
    blocks = (AttentionPart, MLPPart, MixerPart, PerLayerEmbed, RepeatedEmbed, RepeatedIds, TrigramEmbed, Bottleneck)
    blocks += (MLPProjector,)
    sublayers = [
        kind
        for kind in components()
        if is_stated(verification.identities, kind)
        and not issubclass(kind, blocks)
        and not kind.__module__.startswith(heads)
    ]
    assert len(sublayers) >= 14
    assert [kind for kind in sublayers if not is_stated(verification.output_from_sites, kind)] == []
    assert [kind for kind in sublayers if not hasattr(kind, "axes")] == []


def test_nothing_is_stated_of_a_foreign_module() -> None:
    assert not verification.is_known(nn.Linear(2, 2))
    assert verification.weights_after_norms(nn.Linear(2, 2)) == []
    for function in (verification.input_weights, verification.output_weights):
        with pytest.raises(TypeError, match="Linear"):
            function(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Linear"):
        verification.identities(nn.Linear(2, 2), lambda name: name)
    with pytest.raises(TypeError, match="Linear"):
        verification.output_from_sites(nn.Linear(2, 2), lambda name: name)
