"""The wiring of a block, as data: which sublayers read the stream through which norm, and what is added where.

A block says it in `wiring()`, beside its `forward`, which stays the formula that it runs. Values are named by their sites, or by
a word that a step gives where there is no site. What a block computes besides is said in words, `by_hand`; a block with several
streams has no steps at all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hooked_lm.components.norms.norm import norm_of
from hooked_lm.components.norms.scales import ChannelScale

PRE, MID, POST = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
NORMALIZED_MID, NORMALIZED_POST = "hook_normalized_resid_mid", "hook_normalized_resid_post"


@dataclass(frozen=True)
class Sublayer:
    """`writes = scale * post(part(norm(reads), *beside))`; norms are names of modules of the block, "" for none.

    `at` are the on-demand points between the stream and the norm, copies of `reads`; `beside` are inputs besides the stream.
    """

    part: str
    reads: str
    writes: str
    norm: str = ""
    post: str = ""
    scale: float = 1.0
    at: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """`gives = times * (weights[0] * weighed(stream) + weights[1] * sum of terms)`.

    `weighed` is a method of the block and its first argument, `times` a buffer of the block.
    """

    gives: str
    stream: str
    terms: tuple[str, ...]
    weights: tuple[float, float] = (1.0, 1.0)
    weighed: tuple[str, str] | None = None
    times: str = ""


@dataclass(frozen=True)
class InStream:
    """`gives = norm(of)`, from here on the stream."""

    norm: str
    of: str
    gives: str


Step = Sublayer | Sum | InStream


@dataclass(frozen=True)
class Wiring:
    """The steps of a block in the order of computation, and what it computes besides, in words.

    >>> from hooked_lm import HookedTransformer
    >>> wiring = HookedTransformer.from_pretrained("demo").blocks[0].wiring()
    >>> [step.writes for step in wiring.sublayers], wiring.terms_of("hook_resid_post")
    (['hook_attn_out', 'hook_mlp_out'], ('hook_resid_pre', 'hook_attn_out', 'hook_mlp_out'))
    """

    steps: tuple[Step, ...] = ()
    by_hand: str = ""

    @property
    def last(self) -> str:
        """The site of the stream after the block."""
        step = self.steps[-1] if self.steps else None
        return POST if step is None or isinstance(step, Sublayer) else step.gives

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return tuple(step for step in self.steps if isinstance(step, Sublayer))

    @property
    def sums(self) -> tuple[Sum, ...]:
        return tuple(step for step in self.steps if isinstance(step, Sum))

    def of(self, part: str) -> Sublayer | None:
        """The step of a part of the block."""
        return next((step for step in self.sublayers if step.part == part), None)

    def readers_of(self, norm: str) -> tuple[Sublayer, ...]:
        """The sublayers that read the stream through a norm."""
        return tuple(step for step in self.sublayers if step.norm == norm)

    def place(self, value: str) -> Step | None:
        """The step that makes a value; None for what enters the block."""
        made = {Sublayer: "writes", Sum: "gives", InStream: "gives"}
        return next((step for step in self.steps if getattr(step, made[type(step)]) == value), None)

    def chain(self, value: str) -> tuple[Sum, ...] | None:
        """The sums that make a value of the stream from what enters the block, the last first; None if a norm is among them, or
        nothing is known."""
        step, found = self.place(value), []
        while isinstance(step, Sum):
            found.append(step)
            step = self.place(step.stream)
        return tuple(found) if step is None and self.steps else None

    def terms_of(self, value: str) -> tuple[str, ...] | None:
        """What a value is the plain sum of: the stream that enters the block, and what is added to it; None if it is none."""
        sums = self.chain(value)
        if sums is None or any(step.weights != (1.0, 1.0) or step.weighed or step.times for step in sums):
            return None
        return (sums[-1].stream if sums else value, *(term for step in reversed(sums) for term in step.terms))


def wiring_of(block: nn.Module) -> Wiring:
    """The wiring of a block; of a foreign module nothing is known."""
    return block.wiring() if hasattr(block, "wiring") else Wiring(by_hand="a foreign module")  # type: ignore[operator]


def has_part(block: nn.Module, part: str) -> bool:
    """Whether a block has a part whose output is at a site of the block, such as "attn" at `hook_attn_out`."""
    return f"hook_{part}_out" in block._modules


def has_norms_before_parts(block: nn.Module) -> bool:
    """Whether parts of a block read the stream through norms, which otherwise are in the stream after them."""
    wiring = wiring_of(block)
    return not wiring.steps or any(step.norm for step in wiring.sublayers)


def shares_norm(block: nn.Module) -> bool:
    """Whether attention and the MLP of a block read the stream through one norm."""
    norms = [step.norm for step in wiring_of(block).sublayers if step.part in ("attn", "mlp")]
    return len(norms) == 2 and norms[0] == norms[1] != ""


def sublayer_of(block: nn.Module, part: str) -> Sublayer:
    """The step of a part of a block; where the wiring is by hand, as in most blocks."""
    usual: dict[str, Callable[[nn.Module], Sublayer]] = {"attn": attn_step, "mixer": mixer_step, "mlp": mlp_step}
    return wiring_of(block).of(part) or usual[part](block)


def scale_of(block: nn.Module, part: str) -> float:
    """What the output of a part of a block is multiplied by, before it is added to the stream."""
    return sublayer_of(block, part).scale


def _scale(block: nn.Module) -> float:
    cfg: Any = block.cfg
    return cfg.residual_scale


def scales_outputs(block: nn.Module) -> bool:
    """Whether a block multiplies what its sublayers add to the stream."""
    steps = wiring_of(block).sublayers
    return any(step.scale != 1.0 or isinstance(norm_of(block, step.post), ChannelScale) for step in steps)


# ---- the steps of most blocks ------------------------------------------------------------------------------------------


def attn_step(block: nn.Module, reads: str = PRE, norm: str = "ln1", scale: float | None = None) -> Sublayer:
    """Attention of a block, whose on-demand points are copies of the stream for each head."""
    at = tuple(
        name for name in ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input") if name in block._modules
    )
    scale = _scale(block) if scale is None else scale
    return Sublayer("attn", reads, "hook_attn_out", norm, "ln1_post", scale, at)


def mixer_step(block: nn.Module, reads: str = PRE, norm: str = "ln1", scale: float | None = None) -> Sublayer:
    """The mixer of a block."""
    scale = _scale(block) if scale is None else scale
    return Sublayer("mixer", reads, "hook_mixer_out", norm, "ln1_post", scale, ("hook_mixer_in",))


def mlp_step(
    block: nn.Module, reads: str = MID, norm: str = "ln2", post: str = "ln2_post", scale: float | None = None
) -> Sublayer:
    """The MLP of a block."""
    scale = _scale(block) if scale is None else scale
    return Sublayer("mlp", reads, "hook_mlp_out", norm, post, scale, ("hook_mlp_in",))


def added(gives: str, *sublayers: Sublayer, stream: str = "") -> Sum:
    """The outputs of sublayers, added to the stream that the first of them reads, or to another."""
    return Sum(gives, stream or sublayers[0].reads, tuple(step.writes for step in sublayers))
