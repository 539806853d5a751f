"""What models of every class share: where their weights are, and what a bare cache keeps."""

from collections.abc import Collection, Mapping
from copy import copy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hooked_lm.components.blocks.block import AttentionPart
from hooked_lm.components.run_settings import RunSettings, apply_run_settings
from hooked_lm.hooks import Cache, HookedRootModule, HookPoint
from hooked_lm.models.aliases import aliases, same_value
from hooked_lm.models.caches.activation_cache import ActivationCache, NamedCache
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.names import site_name
from hooked_lm.models.stack import Stack, follow_flags
from hooked_lm.models.weights.foreign_state_dict import in_our_names
from hooked_lm.models.weights.init import init_weights

Model = TypeVar("Model", bound="BaseModel")

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


class BaseModel(HookedRootModule):
    """Building a model, moving it and filling it with random weights."""

    stacks: ClassVar[tuple[Stack, ...]]
    cache_class: ClassVar[type[NamedCache]] = ActivationCache
    cfg: Any
    embed: Any
    blocks: Any
    set_tokenizer: Any
    flags: tuple[Any, ...] | None = None  # of the config, as the parts were told last
    hf_config: dict[str, Any] | None = None  # of the checkpoint that it was loaded from

    # ---- building ----------------------------------------------------------------------------------------------------

    def _set_config(self, cfg: Any, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Take a copy of a config, as the caller may build other models from it, and the tokenizer."""
        self.cfg = copy(cfg)
        if default_padding_side is not None:
            self.cfg.default_padding_side = default_padding_side
        self.set_tokenizer(self.find_tokenizer(tokenizer))
        self.cfg.check_tree()

    def find_tokenizer(self, tokenizer: Any) -> Any:
        """The tokenizer that was given; the classes in `pretrained` look for the one that the config names if none was."""
        return tokenizer

    def _initial_device(self, move_to_device: bool) -> torch.device:
        """Where the parts are made."""
        return torch.device(self.cfg.device) if move_to_device else torch.get_default_device()

    def _finish(self) -> None:
        """Bring the parts into the config's dtype, fill them, and find the hook points."""
        if self.embed.W_E.dtype != self.cfg.dtype:
            super().to(self.cfg.dtype)
        if self.cfg.init_weights:
            self.init_weights()
        self.cfg.seal()
        self.setup()

    # ---- device ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the weights are; where `cfg.device` says, as long as there are none."""
        embed = self.__dict__.get("_modules", {}).get("embed")
        return torch.device(self.cfg.device) if embed is None else embed.W_E.device

    def to(self: Model, *args: Any, print_details: bool = True, **kwargs: Any) -> Model:
        """Move the model, as `nn.Module.to` does; `cfg.device` and `cfg.dtype` follow, as with `half` and its like."""
        return super().to(*args, **kwargs)

    def _apply(self: Model, *args: Any, **kwargs: Any) -> Model:
        """What `to`, `half`, `float` and all other moves of PyTorch end in."""
        super()._apply(*args, **kwargs)
        self.cfg.device, self.cfg.dtype = str(self.device), self.embed.W_E.dtype
        return self

    def cuda(self: Model, device: Any = None) -> Model:
        """Move the model to a CUDA device."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self: Model) -> Model:
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self: Model) -> Model:
        """Move the model to an Apple GPU."""
        return self.to("mps")

    def move_model_modules_to_device(self) -> None:
        """Move the weights to where `cfg.device` says."""
        self.to(self.cfg.device)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """The names that other libraries have for the sites."""
        scales = [getattr(getattr(block, "cfg", None), "residual_scale", 1.0) for block in self.blocks]
        return aliases(names, self.cfg.n_layers, scaled=[i for i, scale in enumerate(scales) if scale != 1.0])

    def site_name(self, site: Any) -> str:
        """The full name of a site given as "z5" or ("z", 5); negative layers count from the end."""
        return site_name(site, self.cfg.n_layers)

    def make_cache(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> Cache:
        """What `run_with_cache` returns of this run."""
        return self.cache_class(cache_dict, self, has_batch_dim)

    def in_bare_cache(self, point: HookPoint) -> bool:
        """Whether a cache without a filter keeps this point: all but those on demand, unless a flag asks for them."""
        flag = ON_DEMAND_FLAGS.get((point.name or "").rpartition(".")[2])
        return not point.on_demand or (flag is not None and getattr(self.cfg, flag))

    def predicate_groups(self, points: Mapping[str, HookPoint]) -> list[set[str]]:
        """Groups of names about which a predicate is asked before the others."""
        return [*super().predicate_groups(points), UNEMBED & points.keys()]

    def apply_flags(self) -> None:
        """Tell the parts what the flags of `cfg` say now."""
        cfg, ungrouped = self.cfg, self.cfg.ungroup_grouped_query_attention
        copies = (cfg.use_attn_in, cfg.use_split_qkv_input, cfg.use_attn_result)
        length = min(cfg.n_ctx, RunSettings().rotary_table_length)
        apply_run_settings(self, RunSettings(cfg.fused_attention == "auto", *copies, length))
        for stack in self.stacks:
            for block in stack.blocks_of(self):
                if isinstance(block, AttentionPart) and getattr(block.attn, "ungrouped", ungrouped) != ungrouped:
                    block.attn.ungrouped = ungrouped

    def setup(self) -> None:
        """Find the hook points, also in parts that were replaced since."""
        super().setup()
        self.flags = None  # the parts may be others
        if hasattr(self, "cfg"):
            follow_flags(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a model: its config is that of a model too."""
        super().__setstate__(state)
        if isinstance(self.cfg, FlatConfig):
            self.cfg.seal()

    def same_value(self, site: str) -> str:
        """The site of a bare cache that shows the same value as one on demand, such as `mlp.hook_out`; or itself."""
        points = self.all_points()
        if site not in points or self.in_bare_cache(points[site]):
            return site
        block = self.get_submodule(".".join(site.split(".")[:2]))
        scale = getattr(getattr(block, "cfg", None), "residual_scale", 1.0)
        return same_value(site, points, is_scaled=scale != 1.0)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As for any module; the names and tables of other libraries are understood, see `in_our_names`."""
        return super().load_state_dict(in_our_names(self, state_dict), *args, **kwargs)

    def init_weights(self) -> None:
        """Fill the weights with random numbers as `cfg.init_mode` says, from `cfg.seed` if there is one."""
        init_weights(self, self.cfg)
