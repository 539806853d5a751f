"""The base class of all models: building, devices, sites and flags."""

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.attention.multihead import ProjectedAttention
from hooked_lm.components.blocks.wiring import scales_outputs
from hooked_lm.components.run_settings import RunSettings, apply_run_settings
from hooked_lm.hooks import Cache, HookedRootModule, HookPoint
from hooked_lm.hooks.own_run import RunsInputs
from hooked_lm.models.aliases import aliases, same_value, side_aliases
from hooked_lm.models.attention_rows import AttentionRowMethods
from hooked_lm.models.caches.activation_cache import ActivationCache, NamedCache
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.estimate import Estimate, estimated
from hooked_lm.models.names import side_site_name, site_name
from hooked_lm.models.placement import DeviceMap, Rest, check_stays
from hooked_lm.models.shared_weights import check_shared, share_weights
from hooked_lm.models.shown import model_html
from hooked_lm.models.stack import Stack, apply_config_flags
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.weights.foreign_state_dict import to_native_names
from hooked_lm.models.weights.init import init_weights, leave_unfilled, still_unfilled
from hooked_lm.models.weights.quantize import QuantizeMethods, quantized_apart, refuse_quantized
from hooked_lm.models.weights.weight_scope import refuse_open_scopes

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
# Sites of every TransformerLens cache; name predicates are tried on them before sites that only we have.
UNEMBED = {"unembed.hook_in", "unembed.hook_out"}


class BaseModel(QuantizeMethods, AttentionRowMethods, RunsInputs):
    """Builds a model, moves it between devices, and initializes its weights."""

    stacks: ClassVar[tuple[Stack, ...]]
    config_class: ClassVar[type[FlatConfig]]
    sites_of_images: ClassVar[tuple[str, ...]] = ()  # what names of sites begin with if their batch are images
    reads_both_ways = False  # whether tokens of a prompt depend on later ones, and generated ones do not
    cache_class: ClassVar[type[NamedCache]] = ActivationCache
    cfg: Any
    embed: Any
    blocks: Any
    set_tokenizer: Any
    tokenizer: Any
    checked_tokens: Any
    flags: tuple[Any, ...] | None = None  # of the config, as last applied to the components
    hf_config: dict[str, Any] | None = None  # of the checkpoint that it was loaded from
    device_map: DeviceMap | None = None  # the device of each block, if they are on several; "" is all else
    unfilled: tuple[str, ...] = ()  # the parameters that nobody has filled yet: not to be run with
    offloaded: dict[str, Rest] | None = None  # the blocks whose weights rest in memory or on disk, if there are any

    # ---- building ----------------------------------------------------------------------------------------------------

    def _set_config(
        self, cfg: FlatConfig, tokenizer: Tokenizer | None, default_padding_side: str | None = None
    ) -> None:
        """Sets the tokenizer and a copy of the config, from which the caller may build other models."""
        self.cfg = copy(cfg)
        if default_padding_side is not None:
            self.cfg.default_padding_side = default_padding_side
        self.set_tokenizer(self.find_tokenizer(tokenizer))
        self.cfg.check_tree()

    def find_tokenizer(self, tokenizer: Tokenizer | None) -> Any:
        """The given tokenizer; the classes in `pretrained` load the one named by the config if None."""
        return tokenizer

    def _initial_device(self, move_to_device: bool) -> torch.device:
        """The device on which the components are built."""
        return torch.device(self.cfg.device) if move_to_device else torch.get_default_device()

    def _finish(self) -> None:
        """Converts the components to the config's dtype, shares and initializes weights, and registers the hook points."""
        share_weights(self)
        if self.embed.W_E.dtype != self.cfg.dtype:
            super().to(self.cfg.dtype)
        if self.cfg.init_weights:
            self.init_weights()
        else:
            self.unfilled = leave_unfilled(self)
        self.cfg.seal()
        self.setup()

    # ---- device ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the weights; `cfg.device` before there are any."""
        embed = self.__dict__.get("_modules", {}).get("embed")
        return torch.device(self.cfg.device) if embed is None else embed.W_E.device

    def to(self: Model, *args: Any, print_details: bool = True, **kwargs: Any) -> Model:
        """Moves the model, as `nn.Module.to`, and updates `cfg.device` and `cfg.dtype`, as `half`, `float` etc. do.

        Raises ValueError for a device if the model is on several or has offloaded weights.
        """
        places = (self.device, *(self.device_map or {}).values(), *(self.offloaded or {}).values())
        check_stays(places, *args, **kwargs)
        return super().to(*args, **kwargs)

    def _apply(self: Model, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Model:
        """Called by `to`, `half`, `float` and all other conversions of PyTorch."""
        with quantized_apart(self, fn):
            super()._apply(fn, *args, **kwargs)
        self.cfg.device, self.cfg.dtype = str(self.device), self.embed.W_E.dtype
        return self

    def cuda(self: Model, device: torch.device | int | None = None) -> Model:
        """Moves the model to a CUDA device."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self: Model) -> Model:
        """Moves the model to the CPU."""
        return self.to("cpu")

    def mps(self: Model) -> Model:
        """Moves the model to an Apple GPU."""
        return self.to("mps")

    def move_model_modules_to_device(self) -> None:
        """Moves the weights to `cfg.device`."""
        self.to(self.cfg.device)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """Alias -> site, for names of other libraries."""
        if len(self.stacks) > 1:
            return side_aliases(names, self._layers_of_sides())
        return aliases(
            names, self.cfg.n_layers, scaled=[i for i, block in enumerate(self.blocks) if scales_outputs(block)]
        )

    def site_name(self, site: object) -> str:
        """The full name of a site given as "z5" or ("z", 5); negative layers count from the end.

        Those of an encoder-decoder name its side: ("decoder.z", 5) or ("decoder.z", 5, "cross_attn").
        """
        if len(self.stacks) > 1:
            return side_site_name(site, self._layers_of_sides())
        return site_name(site, self.cfg.n_layers)

    def _layers_of_sides(self) -> dict[str, int]:
        return {stack.blocks: len(stack.blocks_of(self)) for stack in self.stacks}

    def stack_of(self, name: str) -> tuple[str, int]:
        """The stack of a site with this short name ("" in a model with one stack), and its number of layers; 0 if the name is
        that of a site outside all layers. Raises KeyError for a name without its stack, in a model with several."""
        sides, side = self._layers_of_sides(), name.partition(".")[0]
        if len(sides) < 2:
            return "", self.cfg.n_layers
        if side not in sides:
            known = " or ".join(f"'{each}.{name}'" for each in sides)
            raise KeyError(f"a site of an encoder-decoder is named with its stack: {known}")
        return side, sides[side]

    def images_among(self, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"] | None:
        """Which tokens are those of images; None for a model that reads none among its tokens."""
        return None

    def make_cache(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> Cache:
        """The cache that `run_with_cache` returns."""
        return self.cache_class(cache_dict, self, has_batch_dim)

    def prefix(self, *prompt: object, **options: object) -> Any:
        """Raises ValueError; a decoder reads the beginning of prompts once, see `DecoderMethods.prefix`."""
        raise ValueError(
            f"a prefix is computed by a decoder, whose tokens do not depend on later ones; this is a {type(self).__name__}"
        )

    def estimate(self, *prompts: object, what: str | Callable[..., object] = "forward", **options: object) -> Estimate:
        """The memory that a run takes at its peak, part by part, and how much it computes, without running the model.

        The code of the run is carried out on tensors that have shape, dtype and device but no memory. So the answer is that of
        this model, these prompts and options. Hooks take part; detectors, which have no value to see, do not.

        Args:
            prompts: as the run takes them; in place of token ids their shape, such as (8, 64), will do.
            what: "forward" is `model(...)`, "cache" `run_with_cache`, "generate" `generate`, "sweep" `patching.sweep`,
                "attribution" `analysis.attribute`; or another function that takes the model first.
            options: those of the run, such as `names_filter`, `chunk`, `max_memory`, `by` or `max_new_tokens`.

        Where the code depends on values, every question about one is answered with 0 or False: a generation goes on to
        `max_new_tokens`, and the experts of a mixture get as many tokens each. Workspaces within kernels are not counted. Raises
        ValueError for an unknown `what`, for a run whose sizes depend on values, and as the run.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> found = model.estimate((8, 64))
        >>> found.layer_rows == 8 * 64 * model.cfg.n_layers, max(found.bytes_by_part)
        (True, 'weights')
        """
        return estimated(self, what, prompts, options)

    def in_bare_cache(self, point: HookPoint) -> bool:
        """Whether a cache without a filter keeps this point: all but on-demand points, unless a flag includes them."""
        flag = ON_DEMAND_FLAGS.get((point.name or "").rpartition(".")[2])
        return not point.on_demand or (flag is not None and getattr(self.cfg, flag))

    def _repr_html_(self) -> str:
        return model_html(self, self.in_bare_cache)

    def predicate_groups(self, points: Mapping[str, HookPoint]) -> list[set[str]]:
        """Groups of names on which a predicate is tried before the others."""
        return [*super().predicate_groups(points), UNEMBED & points.keys()]

    def apply_flags(self) -> None:
        """Applies the flags of `cfg` to the components."""
        cfg, ungrouped = self.cfg, self.cfg.ungroup_grouped_query_attention
        copies = (cfg.use_attn_in, cfg.use_split_qkv_input, cfg.use_attn_result)
        length = min(cfg.longest_input, RunSettings().rotary_table_length)
        apply_run_settings(self, RunSettings(cfg.fused_attention == "auto", *copies, length))
        for stack in self.stacks:
            for block in stack.blocks_of(self):
                if isinstance(attn := getattr(block, "attn", None), ProjectedAttention):
                    attn.ungrouped = ungrouped

    def setup(self) -> None:
        """Registers the hook points; call it again after replacing a component."""
        super().setup()
        self.flags = None  # components may have been replaced
        if hasattr(self, "cfg") and not self.unfilled:
            apply_config_flags(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy of a model, and seals its config."""
        super().__setstate__(state)
        if isinstance(self.cfg, FlatConfig):
            self.cfg.seal()

    def same_value(self, site: str) -> str:
        """The site of a bare cache with the same value as an on-demand site such as `mlp.hook_out`; else the site itself."""
        points = self.all_points()
        if site not in points or self.in_bare_cache(points[site]):
            return site
        block = self.get_submodule(".".join(site.split(".")[:2]))
        return same_value(site, points, scaled=scales_outputs(block))

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`; also accepts state dicts of other libraries, see `to_native_names`."""
        refuse_open_scopes(self, "load_state_dict")
        refuse_quantized(self, "load_state_dict", "load other weights into a model before quantize()")
        state_dict = to_native_names(self, state_dict)
        check_shared(self, state_dict)
        found = super().load_state_dict(state_dict, *args, **kwargs)
        self.unfilled = still_unfilled(self, self.unfilled)
        return found

    def init_weights(self) -> None:
        """Initializes the weights at random according to `cfg.init_mode` and `cfg.seed`."""
        refuse_open_scopes(self, "init_weights")
        refuse_quantized(self, "init_weights", "initialize the weights before quantize()")
        init_weights(self, self.cfg)

    def untrained(self: Model, seed: int = 0) -> Model:
        """The model's untrained twin: the same config, tokenizer, device and dtype, and random weights drawn with `seed`.

        What a method finds in it as well, it does not find by training (Adebayo et al. 2018, arXiv:1810.03292).

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> twin = model.untrained(seed=1)
        >>> twin.W_Q.shape == model.W_Q.shape, torch.equal(twin.W_Q, model.W_Q)
        (True, False)
        """
        new = {"init_weights": True, "seed": seed, "processed": (), "tokenizer_name": None, "device": str(self.device)}
        known = {name: value for name, value in new.items() if hasattr(self.cfg, name)}
        return type(self)(replace(self.cfg, **known), self.tokenizer)


def is_outside_blocks(model: HookedRootModule, name: str) -> bool:
    """Whether this is the full name of a site that is not in a block, nor in one of a tower."""
    return name in model.hook_dict and ".blocks." not in f".{name}"
