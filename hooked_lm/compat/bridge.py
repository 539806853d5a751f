"""TransformerBridge: the successor of HookedTransformer in TransformerLens 3.x, here a subclass of HookedTransformer."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm import pretrained
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.weights.fold import process_weights
from hooked_lm.pretrained import HookedEncoder, HookedEncoderDecoder, HookedTransformer, PretrainedModel

SUBLAYERS = ("attn", "mixer", "mlp")
# Fields of the bridge's config without effect here, and their accepted values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "architecture": (None, "TransformerLensNative"),
    "tokenizer_appends_eos": (False,),
    "trust_remote_code": (False,),
    "per_layer_head_dim": (None,),
    "per_layer_num_key_value_heads": (None,),
    "scale_embedding": (None, False),
    "tie_word_embeddings": (False,),
    "rmsnorm_uses_offset": (False,),
    "attn_implementation": (None, "eager", "sdpa"),
    "is_audio_model": (False,),
    "is_visual_model": (False,),
    "is_stateful": (False,),
    "is_multimodal": (False,),
    "vision_hidden_size": (None,),
    "vision_num_layers": (None,),
    "vision_num_heads": (None,),
    "mm_tokens_per_image": (None,),
}


def without_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those of `NEUTRAL`; raises ValueError if one of these requests something unsupported."""
    unsupported = {name: fields[name] for name in NEUTRAL if name in fields and fields[name] not in NEUTRAL[name]}
    if unsupported:
        raise ValueError("not supported here: " + ", ".join(f"{name}={value!r}" for name, value in unsupported.items()))
    return {name: value for name, value in fields.items() if name not in NEUTRAL}


class TransformerBridgeConfig(HookedTransformerConfig):
    """A `HookedTransformerConfig` that also accepts the fields of a bridge, unless they request something unsupported.

    >>> TransformerBridgeConfig(
    ...     d_model=8, d_head=4, n_layers=1, n_ctx=16, d_vocab=10, architecture=None
    ... ).n_heads
    2
    """

    def __init__(self, d_model: int, d_head: int, n_layers: int, n_ctx: int, **fields: Any) -> None:
        fields = {"act_fn": "relu", **without_neutral(fields)}
        super().__init__(d_model=d_model, d_head=d_head, n_layers=n_layers, n_ctx=n_ctx, **fields)


class _Bridge(PretrainedModel):
    """What models of every kind have that `TransformerBridge.boot_transformers` returns."""

    compatibility_mode = False

    def enable_compatibility_mode(
        self, disable_warnings: bool = False, no_processing: bool = False, **rewrites: bool
    ) -> None:
        """Folds the weights as `from_pretrained` of the model's class does, or keeps them; the site names exist in any case.

        `rewrites` are the arguments of `hooked_lm.models.weights.fold.process_weights`, such as `fold_ln=False`.
        """
        if not no_processing:
            self.process_weights(**rewrites)
        self.compatibility_mode = True

    def process_weights(self, verbose: bool = False, **rewrites: bool) -> None:
        """Rewrites nothing: encoders and encoder-decoders are not folded. Raises ValueError for a rewrite that is requested."""
        if requested := ", ".join(name for name, is_wanted in rewrites.items() if is_wanted):
            raise ValueError(
                f"{requested}: the weights of decoders are folded, not those of an {type(self).__name__}; omit it"
            )

    @property
    def original_model(self) -> Any:
        """A new transformers model with these weights; changes to it do not affect this model."""
        return self.to_hf()

    def tl_parameters(self) -> dict[str, Tensor]:
        """The weights by parameter names of HookedTransformer; keys and values are not repeated for grouped heads."""
        return dict(self.state_dict(keep_vars=True))

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the items of `tl_parameters`."""
        return iter(self.tl_parameters().items())

    get_params = tl_parameters


class EncoderBridge(_Bridge, HookedEncoder):
    """An encoder with the unprocessed weights of a checkpoint; `enable_compatibility_mode` keeps them, as for `HookedEncoder`."""


class EncoderDecoderBridge(_Bridge, HookedEncoderDecoder):
    """An encoder-decoder with the unprocessed weights of a checkpoint; `enable_compatibility_mode` keeps them."""


class TransformerBridge(_Bridge, HookedTransformer):
    """A decoder with the unprocessed weights of a checkpoint, and the methods of both interfaces.

    The site names of a bridge ("blocks.0.hook_out", "blocks.0.attn.q.hook_out") are aliases, as in every model of hooked_lm.
    `enable_compatibility_mode` folds the weights as `HookedTransformer.from_pretrained` does. `boot_transformers` returns
    an `EncoderBridge` or `EncoderDecoderBridge` for encoders and encoder-decoders.

    >>> bridge = TransformerBridge.boot_transformers("demo")
    >>> logits, cache = bridge.run_with_cache(
    ...     "The capital of France is", names_filter="blocks.0.attn.q.hook_out"
    ... )
    >>> cache["blocks.0.attn.q.hook_out"] is cache["q", 0]
    True
    """

    @property
    def _hook_registry(self) -> dict[str, HookPoint]:
        """All points; separate from `hook_dict`, which subclasses may override."""
        return self._points

    # ---- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def boot_transformers(
        cls,
        model_name: str,
        hf_config_overrides: dict[str, Any] | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
        tokenizer: Any = None,
        load_weights: bool = True,
        trust_remote_code: bool = False,
        model_class: type | None = None,
        hf_model: Any = None,
        device_map: Any = None,
        n_devices: int | None = None,
        max_memory: dict[Any, Any] | None = None,
        n_ctx: int | None = None,
        revision: str | None = None,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
    ) -> "TransformerBridge | EncoderBridge | EncoderDecoderBridge":
        """A model with a checkpoint's unprocessed weights; see `hooked_lm.pretrained.from_pretrained`.

        Raises ValueError for unsupported options: a model without weights, code from a checkpoint, another transformers class.
        """
        refused = {
            "load_weights=False": not load_weights,
            "trust_remote_code=True": trust_remote_code,
            "model_class": model_class is not None,
        }
        if any(refused.values()):
            unsupported = ", ".join(name for name, given in refused.items() if given)
            raise ValueError(f"boot_transformers does not support {unsupported}: omit it")
        model = pretrained.from_pretrained_no_processing(
            model_name,
            hf_model=hf_model,
            device=device,
            dtype=dtype,
            tokenizer=tokenizer,
            device_map=device_map,
            max_memory=max_memory,
            n_devices=1 if n_devices is None else n_devices,
            n_ctx=n_ctx,
            revision=revision,
            checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
            **(hf_config_overrides or {}),
        )
        bridges = {HookedTransformer: cls, HookedEncoder: EncoderBridge, HookedEncoderDecoder: EncoderDecoderBridge}
        model.__class__ = next((bridges[kind] for kind in bridges if isinstance(model, kind)), type(model))
        return model

    @classmethod
    def boot_native(
        cls,
        config: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        model_name: str = "native",
    ) -> "TransformerBridge":
        """A new model with random weights.

        >>> cfg = dict(
        ...     d_model=16, d_head=8, n_layers=1, n_ctx=8, d_vocab=10, act_fn="gelu", seed=0
        ... )
        >>> TransformerBridge.boot_native(cfg).cfg.model_name
        'native'
        """
        fields = without_neutral(config) if isinstance(config, dict) else config
        bridge = cls(HookedTransformerConfig.unwrap(fields), tokenizer=tokenizer)
        bridge.cfg.model_name = model_name
        return bridge.to(device=device, dtype=dtype) if device is not None or dtype is not None else bridge

    # ---- the weights of a HookedTransformer --------------------------------------------------------------------------

    def process_weights(self, verbose: bool = False, **rewrites: bool) -> None:
        """Rewrites the weights in place; see `hooked_lm.models.weights.fold.process_weights`."""
        process_weights(self, **rewrites)

    # ---- names -------------------------------------------------------------------------------------------------------

    @property
    def hook_aliases(self) -> dict[str, str]:
        """The aliases of sites, by alias."""
        return dict(self.aliases)

    def _collect_hook_aliases_from_registry(self) -> dict[str, str]:
        return self.hook_aliases

    def get_hook_point(self, hook_name: str) -> HookPoint | None:
        """The point with a name or an alias; None if there is none."""
        points = self._hook_registry
        return points.get(hook_name) or points.get(self.aliases.get(hook_name, ""))

    def block_hooks(self, layer_idx: int) -> list[str]:
        """The sites of a block, named relative to the block, in alphabetical order."""
        block = f"blocks.{layer_idx}."
        return sorted(name.removeprefix(block) for name in self.all_points() if name.startswith(block))

    def blocks_with(self, submodule: str) -> list[tuple[int, nn.Module]]:
        """The blocks that have a submodule of this name, with their layers."""
        return [(i, block) for i, block in enumerate(self.blocks) if submodule in block._modules]

    def block_submodules(self, layer_idx: int) -> list[str]:
        """The names of a block's submodules, without hook points."""
        parts = self.blocks[layer_idx].named_children()
        return [name for name, part in parts if not isinstance(part, HookPoint)]

    def layer_types(self) -> list[str]:
        """The sublayers of each block: "attn+mlp", "mixer", ..."""
        return ["+".join(name for name in SUBLAYERS if name in block._modules) for block in self.blocks]

    def stack_params_for(
        self, submodule: str, attr_path: str, reshape_fn: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[list[int], Tensor]:
        """The layers of all blocks with a submodule, and its weight in them, [layer, ...]; raises ValueError if there are none.

        >>> bridge = TransformerBridge.boot_transformers("demo")
        >>> layers, weights = bridge.stack_params_for("attn", "attn.W_Q")
        >>> layers, weights.shape == bridge.W_Q.shape
        ([0, 1, 2, 3], True)
        """
        found = self.blocks_with(submodule)
        if not found:
            raise ValueError(f"no block has a submodule {submodule!r}; those of block 0 are {self.block_submodules(0)}")
        weights = [_attribute(block, attr_path) for _, block in found]
        return [i for i, _ in found], torch.stack([w if reshape_fn is None else reshape_fn(w) for w in weights])

    def hf_generate(self, input: str | Tensor, **options: Any) -> Any:
        """What `generate` of `original_model` gives: the text of a text, with its prompt, or ids [batch, pos] of ids.

        `options` are those of transformers. No hook runs in it: it is a separate model, made for this call.
        """
        ids = self.to_tokens(input) if isinstance(input, str) else input
        found = self.original_model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return (
            self.to_string(found[0, 1:] if self.cfg.default_prepend_bos else found[0])
            if isinstance(input, str)
            else found
        )


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
