"""Transcoders in the layouts of circuit-tracer and SAELens: what each library writes the other loads, with equal outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from circuit_tracer.transcoder.activation_functions import JumpReLU as TheirJumpReLU
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder as TheirCrossLayer
from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
from circuit_tracer.transcoder.single_layer_transcoder import (
    SingleLayerTranscoder,
    load_gemma_scope_2_transcoder,
    load_gemma_scope_transcoder,
)
from circuit_tracer.transcoder.single_layer_transcoder import TranscoderSet as TheirSet
from safetensors.torch import save_file
from torch import Tensor

from hooked_lm.interventions.dictionaries import (
    SAE,
    BatchTopK,
    CrossLayerTranscoder,
    JumpReLU,
    LayerTranscoders,
    TopK,
    Transcoder,
    TranscoderSet,
    load_circuit_tracer,
    load_gemma_scope,
    load_saelens,
    load_transcoders,
    save_circuit_tracer,
    save_saelens,
)  # fmt: skip
from tests.clients.circuit_tracer_run import filled
from tests.close import assert_apart, assert_close

N, D, WIDTH = 3, 16, 40
CPU = torch.device("cpu")
READ, WRITTEN = "mlp.hook_in", "hook_mlp_out"


def x() -> Tensor:
    return torch.randn(N, 7, D, generator=torch.Generator().manual_seed(1))


def ours(kind: type[SAE], skip: bool, across: bool) -> LayerTranscoders:
    """Transcoders whose every weight is some number."""
    configs = tuple(
        kind.Config(
            D, WIDTH, hook_point=f"blocks.{layer}.{READ}", hook_point_out=f"blocks.{layer}.{WRITTEN}",
            subtract_b_dec=False, skip_connection=skip, **({"k": 5} if issubclass(kind, TopK) else {}),
        )
        for layer in range(N)
    )  # fmt: skip
    made = LayerTranscoders.Config(configs, across).build()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in made.state_dict().items():
            noise = 0.2 * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise.abs() if name.endswith("threshold") else noise)
    return made.eval().requires_grad_(False)


def with_thresholds(theirs: Any) -> Any:
    """Theirs with weights that depend on their names, and thresholds that are not negative."""
    filled(theirs, 0.2)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("threshold"):
                weight.abs_()
    return theirs


def assert_same_outputs(one: LayerTranscoders, other: Any) -> None:
    """`other` is a transcoder of circuit-tracer, of all layers."""
    vectors = x()
    features = torch.stack([one.encode(place, vectors[place]) for place in range(N)])
    assert_close(features, other.encode(vectors).detach())
    made = torch.stack(one(list(vectors)))
    assert_close(made, other.decode(other.encode(vectors), vectors).detach())
    silent = other.decode(torch.zeros_like(features).index_fill_(2, torch.tensor([0]), 1e-9), vectors)
    assert_apart(made, silent.detach(), msg="the control: features that say nothing")


KINDS = [Transcoder, JumpReLU, BatchTopK]


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_their_code_loads_our_sets(kind: type[SAE], skip: bool, tmp_path: Path) -> None:
    from circuit_tracer.utils.hf_utils import load_transcoders as their_loader

    made = ours(kind, skip, across=False)
    save_circuit_tracer(made, tmp_path, model_name="mine", scan="mine")
    listed = [str(tmp_path / f"layer_{layer}.safetensors") for layer in range(N)]
    config = {"model_kind": "transcoder_set", "scan": "mine", "transcoders": listed}
    config |= {"feature_input_hook": READ, "feature_output_hook": WRITTEN}
    theirs = their_loader(config, device=CPU, lazy_decoder=False)
    assert (theirs.feature_input_hook, theirs.skip_connection) == (READ, skip)
    assert_same_outputs(made, theirs)
    import yaml

    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written == {
        "model_name": "mine", "model_kind": "transcoder_set", "feature_input_hook": READ, "feature_output_hook": WRITTEN,
        "scan": "mine",
    }  # fmt: skip
    again = load_transcoders(tmp_path)
    assert isinstance(again, TranscoderSet)
    assert (again.sites, again.layers) == (made.sites, made.layers)
    assert_close(again(list(x())), made(list(x())))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_their_code_loads_our_cross_layer_transcoder(kind: type[SAE], tmp_path: Path) -> None:
    made = ours(kind, False, across=True)
    save_circuit_tracer(made, tmp_path)
    theirs = load_clt(str(tmp_path), READ, WRITTEN, device=CPU, dtype=torch.float32, lazy_decoder=False)
    assert_same_outputs(made, theirs)
    again = load_transcoders(tmp_path)
    assert isinstance(again, CrossLayerTranscoder)
    assert_close(again(list(x())), made(list(x())))


@pytest.mark.parametrize("jump", [False, True], ids=["relu", "jumprelu"])
@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
def test_our_code_loads_their_sets(skip: bool, jump: bool, tmp_path: Path) -> None:
    each = {
        layer: SingleLayerTranscoder(
            D, WIDTH, TheirJumpReLU(torch.full((WIDTH,), 0.3)) if jump else torch.nn.functional.relu, layer, skip, device=CPU,
            dtype=torch.float32,
        )
        for layer in range(N)
    }  # fmt: skip
    theirs = with_thresholds(TheirSet(each, READ, WRITTEN))
    theirs.to_safetensors(str(tmp_path))
    found = load_circuit_tracer(tmp_path, READ, WRITTEN)
    assert found.parts[0].kind == ("jumprelu" if jump else "transcoder")
    assert_same_outputs(found, theirs)


@pytest.mark.parametrize("activation", ["relu", "jump_relu"])
def test_our_code_loads_their_cross_layer_transcoder(activation: str, tmp_path: Path) -> None:
    theirs = TheirCrossLayer(N, WIDTH, D, activation, lazy_decoder=False, device=CPU, dtype=torch.float32)
    with_thresholds(theirs).to_safetensors(str(tmp_path))
    found = load_circuit_tracer(tmp_path, READ, WRITTEN)
    assert isinstance(found, CrossLayerTranscoder)
    assert_same_outputs(found, theirs)


def scope(skip: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"w_enc": (D, WIDTH), "w_dec": (WIDTH, D), "b_enc": (WIDTH,), "b_dec": (D,), "threshold": (WIDTH,)}
    shapes |= {"affine_skip_connection": (D, D)} if skip else {}
    drawn = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**drawn, "threshold": drawn["threshold"].abs()}


def test_transcoders_of_gemma_scope(tmp_path: Path) -> None:
    import numpy as np

    folder = tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_3" / "width_16k"
    folder.mkdir(parents=True)
    names = {"w_enc": "W_enc", "w_dec": "W_dec"}
    np.savez(folder / "params.npz", **{names.get(name, name): weight.numpy() for name, weight in scope().items()})
    theirs = load_gemma_scope_transcoder(str(folder / "params.npz"), 3, CPU)
    found = load_gemma_scope(folder)
    assert (found.cfg.hook_point, found.cfg.hook_point_out) == ("blocks.3.ln2.hook_normalized", "blocks.3.hook_mlp_out")
    assert_close(found(x()), theirs(x()).detach())
    listed = tmp_path / "set"
    listed.mkdir()
    lines = [
        "model_kind: transcoder_set",
        "feature_input_hook: ln2.hook_normalized",
        "feature_output_hook: hook_mlp_out",
    ]
    lines += ["transcoders:", *(f"  - {folder}/params.npz" for _ in range(2))]
    (listed / "config.yaml").write_text("\n".join(lines))
    of_two = load_circuit_tracer(listed)
    assert of_two.sites[1] == "blocks.1.ln2.hook_normalized"
    assert_close(of_two.parts[1](x()), theirs(x()).detach())


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
def test_transcoders_of_gemma_scope_2(skip: bool, tmp_path: Path) -> None:
    folder = tmp_path / "transcoder_all" / "layer_5_width_16k_l0_small"
    folder.mkdir(parents=True)
    save_file(scope(skip), folder / "params.safetensors")
    theirs = load_gemma_scope_2_transcoder(str(folder / "params.safetensors"), 5, CPU)
    found = load_gemma_scope(folder)
    assert (found.cfg.hook_point, found.cfg.hook_point_out) == ("blocks.5.mlp.hook_in", "blocks.5.hook_mlp_out")
    assert_close(found(x()), theirs(x()).detach())


def test_a_negative_threshold_means_something_else_there(tmp_path: Path) -> None:
    """There negative pre-activations above it are features, here no feature is negative: such files are refused."""
    made = SingleLayerTranscoder(
        D, WIDTH, TheirJumpReLU(torch.full((WIDTH,), -0.3)), 0, device=CPU, dtype=torch.float32
    )
    filled(TheirSet({0: made}, READ, WRITTEN), 0.0).to_safetensors(str(tmp_path))
    assert load_circuit_tracer(tmp_path, READ, WRITTEN).parts[0].kind == "jumprelu"
    with torch.no_grad():
        made.activation_function.threshold.fill_(-0.3)
    TheirSet({0: made}, READ, WRITTEN).to_safetensors(str(tmp_path))
    with pytest.raises(ValueError, match="layer 0, has 40 thresholds below 0"):
        load_circuit_tracer(tmp_path, READ, WRITTEN)


SAELENS = ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"]


@pytest.mark.parametrize("architecture", SAELENS)
def test_saelens_both_ways(architecture: str, tmp_path: Path) -> None:
    from sae_lens import SAE as TheirSAE
    from sae_lens.registry import get_sae_class

    cls, config = get_sae_class(architecture)
    cfg = config(d_in=D, d_sae=WIDTH, d_out=D, apply_b_dec_to_input=False)
    cfg.metadata.hook_name, cfg.metadata.hook_name_out = "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"
    theirs = with_thresholds(cls(cfg))
    theirs.save_model(tmp_path / "theirs")
    found = load_saelens(tmp_path / "theirs")
    assert isinstance(found, SAE)
    assert found.cfg.skip_connection == ("skip" in architecture)
    assert_close(found.encode(x()), theirs.encode(x()).detach())
    assert_close(found(x()), theirs(x()).detach())
    save_saelens(found, tmp_path / "ours")
    again = TheirSAE.load_from_disk(tmp_path / "ours", device="cpu")
    assert type(again) is cls
    assert_close(again(x()).detach(), found(x()))
