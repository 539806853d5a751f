"""MLPs whose neurons are split over ranks."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from hooked_lm.components.activations import ACTIVATIONS, XIELU, ScaledAct, activation_name
from hooked_lm.components.axes import places_of
from hooked_lm.components.mlp import MLP, AbstractGatedMLP, AbstractMLP, GatedMLP, Stream, hooked_input, multiply_into
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.parallel.guard import SplitModule, computing, split_class
from hooked_lm.parallel.points import split_point
from hooked_lm.parallel.ranks import Ranks

NEURON_AXES = places_of(GatedMLP, "d_mlp")
OVER_ALL_NEURONS = ("solu",)  # activation functions that need all neurons of a token


class NeuronSplit(SplitModule):
    """An MLP of which each rank has some of the neurons."""

    guarded = tuple(NEURON_AXES)

    def summed(self, partial: Stream, bias: Tensor | None) -> Stream:
        """The output of all ranks' neurons."""
        out = self.ranks.add_up(partial)
        return out if bias is None else out + bias


class SplitMLP(NeuronSplit, AbstractMLP):
    """A plain MLP, split by neurons."""

    def forward(self, x: Stream) -> Stream:
        x = self.ranks.enter(hooked_input(self, x))
        with computing():
            post = self.act_fn(self.hook_pre(F.linear(x, self.W_in.T, self.b_in)))
            partial = F.linear(self.hook_post(post), self.W_out.T)
        return self.hook_out(self.summed(partial, self.b_out))


class SplitGatedMLP(NeuronSplit, AbstractGatedMLP):
    """A gated MLP, split by neurons."""

    def forward(self, x: Stream) -> Stream:
        x = self.ranks.enter(hooked_input(self, x))
        with computing():
            gate = self.act_fn(self.hook_pre(F.linear(x, self.W_gate.T, self.b_gate)))
            linear = self.hook_pre_linear(F.linear(x, self.W_in.T, self.b_in))
            is_shared = isinstance(self.act_fn, nn.Module) or is_listening(self.hook_pre, self.hook_pre_linear)
            post = gate * linear if is_shared else multiply_into(gate, linear)
            partial = F.linear(self.hook_post(post), self.W_out.T)
        return self.hook_out(self.summed(partial, self.b_out))


CLASSES: dict[type[nn.Module], type[SplitMLP | SplitGatedMLP]] = {MLP: SplitMLP, GatedMLP: SplitGatedMLP}


def obstacles(mlp: MLP | GatedMLP, ranks: Ranks) -> Iterator[str]:
    """Why this MLP cannot be split."""
    if mlp.cfg.d_mlp % ranks.size:
        yield f"{mlp.cfg.d_mlp} neurons are no multiple of {ranks.size}"
    if mlp.cfg.mid_norm is not None:
        yield "its mid_norm is computed over all neurons"
    act_fn = mlp.cfg.act_fn
    known = isinstance(act_fn, (str, ScaledAct)) and activation_name(act_fn) in ACTIVATIONS
    if activation_name(act_fn) in OVER_ALL_NEURONS or not (known or isinstance(act_fn, XIELU.Config)):
        yield f"its activation function {activation_name(act_fn)} is computed over all neurons, or is unknown"


def split_mlp(module: nn.Module, ranks: Ranks) -> SplitMLP | SplitGatedMLP:
    """The MLP for this one, split by neurons."""
    mlp = split_class(module, CLASSES[type(module)], ranks)
    for name, axis in NEURON_AXES.items():
        if mlp._parameters.get(name) is not None:
            mlp.take_part(name, axis)
    for name, part in list(mlp.named_children()):
        if isinstance(part, HookPoint):
            setattr(mlp, name, split_point(part, ranks))
        for weight, _ in part.named_parameters():  # of the activation function
            mlp.sum_gradient(f"{name}.{weight}")
    return mlp
