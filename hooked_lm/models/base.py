"""What models of every class share: where their weights are, what a bare cache keeps, the way to and from checkpoints."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hooked_lm.components.manner import FUSED, Manner, follow
from hooked_lm.hooks import HookPoint
from hooked_lm.models.aliases import same_value
from hooked_lm.models.config.settled import SettledConfig
from hooked_lm.models.weights.foreign_state_dict import in_our_names
from hooked_lm.models.weights.init import init_weights

Placed = TypeVar("Placed", bound="PlacedModel")

ON_DEMAND_FLAGS = {
    "hook_tokens": "use_hook_tokens",
    "hook_attn_in": "use_attn_in",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_result": "use_attn_result",
    "hook_mlp_in": "use_hook_mlp_in",
}
# In every cache of TransformerLens: a predicate on names means these rather than sites that are ours alone.
UNEMBED = {"unembed.hook_in", "unembed.hook_out"}


def tokenizer_for(cfg: Any, tokenizer: Any) -> Any:
    """The tokenizer that was given, else the one that a config names, if it names one.

    Where that cannot be had, a model whose vocabulary is known goes without, and a warning says so; else ValueError.
    """
    if tokenizer is not None or not cfg.tokenizer_name:
        return tokenizer
    from hooked_lm import hub

    try:
        return hub.named_tokenizer(cfg.tokenizer_name)
    except (ValueError, OSError) as error:
        if cfg.d_vocab == -1:
            raise ValueError(f"d_vocab is missing, and the tokenizer that says it was not found: {error}") from error
        warnings.warn(f"the model has no tokenizer: {error}; give one with set_tokenizer", stacklevel=3)
        return None


class PlacedModel:
    """Moving a model, filling it with random weights, and writing it back; mixed in before `HookedRootModule`."""

    cfg: Any
    embed: Any
    manner: Manner | None = None  # what the parts were told last
    hf_config: dict[str, Any] | None = None  # of the checkpoint that it was loaded from

    @property
    def device(self) -> torch.device:
        """Where the weights are; where `cfg.device` says, as long as there are none."""
        embed = self.__dict__.get("_modules", {}).get("embed")
        return torch.device(self.cfg.device) if embed is None else embed.W_E.device

    def to(self: Placed, *args: Any, print_details: bool = True, **kwargs: Any) -> Placed:
        """Move the model, as `nn.Module.to` does; `cfg.device` and `cfg.dtype` follow, as with `half` and its like."""
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def _apply(self: Placed, *args: Any, **kwargs: Any) -> Placed:
        """What `to`, `half`, `float` and all other moves of PyTorch end in."""
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        self.cfg.device, self.cfg.dtype = str(self.device), self.embed.W_E.dtype
        return self

    def cuda(self: Placed, device: Any = None) -> Placed:
        """Move the model to a CUDA device."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self: Placed) -> Placed:
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self: Placed) -> Placed:
        """Move the model to an Apple GPU."""
        return self.to("mps")

    def move_model_modules_to_device(self) -> None:
        """Move the weights to where `cfg.device` says."""
        self.to(self.cfg.device)

    def in_bare_cache(self, point: HookPoint) -> bool:
        """Whether a cache without a filter keeps this point: all but those on demand, unless a flag asks for them."""
        flag = ON_DEMAND_FLAGS.get((point.name or "").rpartition(".")[2])
        return not point.on_demand or (flag is not None and getattr(self.cfg, flag))

    def asked_first(self, points: Mapping[str, HookPoint]) -> list[set[str]]:
        """Groups of names about which a predicate is asked before the others."""
        return [*super().asked_first(points), UNEMBED & points.keys()]  # type: ignore[misc]

    def follow_manner(self) -> None:
        """Tell the parts what the flags of `cfg` say now, if it is something new. Raises ValueError for an unknown value."""
        cfg = self.cfg
        if cfg.fused_attention not in FUSED:
            raise ValueError(f"cfg.fused_attention must be one of {FUSED}, got {cfg.fused_attention!r}")
        flags = (cfg.use_attn_in, cfg.use_split_qkv_input, cfg.use_attn_result)
        manner = Manner(cfg.fused_attention == "auto", *flags, min(cfg.n_ctx, Manner().n_tabulated))
        if manner != self.manner:
            follow(self, manner)  # type: ignore[arg-type]
            self.manner = manner

    def setup(self) -> None:
        """Find the hook points, also in parts that were replaced since."""
        super().setup()  # type: ignore[misc]
        self.manner = None  # the parts may be others
        if hasattr(self, "cfg"):
            self.follow_manner()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a model: its config is that of a model too."""
        super().__setstate__(state)  # type: ignore[misc]
        if isinstance(self.cfg, SettledConfig):
            self.cfg.seal()

    def same_value(self, site: str) -> str:
        """The site of a bare cache that shows the same value as one on demand, such as `mlp.hook_out`; or itself."""
        points = self.all_points()  # type: ignore[attr-defined]
        if site not in points or self.in_bare_cache(points[site]):
            return site
        block = self.get_submodule(".".join(site.split(".")[:2]))  # type: ignore[attr-defined]
        scale = getattr(getattr(block, "cfg", None), "residual_scale", 1.0)
        return same_value(site, points, is_scaled=scale != 1.0)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As for any module; the names and tables of other libraries are understood, see `in_our_names`."""
        return super().load_state_dict(in_our_names(self, state_dict), *args, **kwargs)  # type: ignore[misc]

    def init_weights(self) -> None:
        """Fill the weights with random numbers as `cfg.init_mode` says, from `cfg.seed` if there is one."""
        init_weights(self, self.cfg)  # type: ignore[arg-type]

    def to_hf(self) -> Any:
        """This model as a transformers model, bit for bit; see `hooked_lm.hub.to_hf`."""
        from hooked_lm import hub

        return hub.to_hf(self)  # type: ignore[arg-type]

    def save_pretrained(self, path: Any) -> None:
        """Write this model to a directory in HF format; see `hooked_lm.hub.save_pretrained`."""
        from hooked_lm import hub

        hub.save_pretrained(self, path)  # type: ignore[arg-type]
