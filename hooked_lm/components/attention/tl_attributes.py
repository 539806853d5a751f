"""Attributes of attention in the public interface, beside its weights and hook points."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.position_bias import FirstSharedBias, Sparsity
from hooked_lm.components.attention.public_steps import rotary_of, tables
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.context import Context
from hooked_lm.components.run_settings import RunSettings
from hooked_lm.factored_matrix import FactoredMatrix

# Entries of a state dict that are not weights; optional when a state dict is loaded.
CONSTANTS = ("mask", "IGNORE")


def order_parameters(module: nn.Module) -> None:
    """Put a module's parameters in its `parameter_order`, which optimisers and random initialisation follow."""
    for name in getattr(module, "parameter_order", ()):
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)


class AttentionTLAttributes(nn.Module):
    """Read-only properties under their public names, and the mask and rotary tables that users share between layers.

    Masks and angles are computed for each run, and no table is stored. So a table may be assigned only if it equals the
    layer's; another raises ValueError.
    """

    cfg: Any
    scale: float
    causal: bool
    window: int | None
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    b_Q: Tensor | None
    b_K: Tensor | None
    b_V: Tensor | None
    W_O: Tensor
    layer_id: int | None = None  # the index of its block; None outside of one
    sinks: Tensor | None
    settings = RunSettings()
    mixes_linearly = True  # whether `W_O` reads values mixed by weights that do not depend on them
    mixes_inputs = False  # whether queries, keys and values also depend on the inputs of earlier tokens
    key_value_parts: tuple[str, ...]  # the sites, weights and submodules of keys and values
    score_sites: tuple[str, ...] = ("hook_attn_scores", "hook_pattern")
    parameter_order = ("W_Q", "W_O", "b_Q", "b_O", "sinks", "W_K", "W_V", "b_K", "b_V")

    def makes_keys(self, name: str) -> bool:
        """Whether a site or weight, by its name below this module, is one of keys and values."""
        return f"{name}.".startswith(tuple(f"{part}." for part in self.key_value_parts))

    @property
    def attn_type(self) -> str:
        """ "local" for attention within a window, else "global"."""
        return "global" if self.window is None else "local"

    @property
    def attn_scale(self) -> float:
        """The divisor of the scores."""
        return 1 / self.scale

    @attn_scale.setter
    def attn_scale(self, value: float) -> None:
        self.scale = 1 / value

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` of every head, [head, d_model, d_model]."""
        return FactoredMatrix(self.per_query_head(self.W_V), self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_K^T` of every head, [head, d_model, d_model]."""
        return FactoredMatrix(self.W_Q, self.per_query_head(self.W_K).transpose(-2, -1))

    @property
    def is_linear_in_values(self) -> bool:
        """Whether a vector added to all values is added to the output, through `W_O`."""
        cfg = self.cfg
        normed = cfg.v_norm is not None or cfg.z_norm is not None
        has_own_values = self.mixes_linearly and not normed and not cfg.values_from_keys
        return has_own_values and cfg.clip is None and self.sinks is None

    def per_query_head(self, weight: Float[Tensor, "kv_head *width"]) -> Float[Tensor, "head *width"]:
        """A weight or bias of keys or values, repeated for each query head."""
        return weight.repeat_interleave(self.W_O.shape[0] // weight.shape[0], 0)

    def visible_keys(self, n_pos: int, queries: slice = slice(None)) -> Bool[Tensor, "query_pos key_pos"]:
        """Which keys these queries of a text without padding attend to."""
        context = Context(n_pos, torch.device("cpu")).of_queries(torch.arange(n_pos)[queries])
        visible = context.full_mask(self.causal, self.window)[0, 0]
        bias = getattr(self, "position_bias", None)
        return visible & bias.bias(context, torch.float32)[0, 0].isfinite() if isinstance(bias, Sparsity) else visible

    # ---- the relative position bias of T5 ----------------------------------------------------------------------------

    @property
    def has_relative_attention_bias(self) -> bool:
        """Whether it has the weights of a relative position bias: its own, or as the first layer those of its stack."""
        return isinstance(getattr(self, "position_bias", None), RelativeBias | FirstSharedBias)

    @property
    def rel_pos_bias(self) -> RelativeBias:
        """The relative position bias, with its weights; AttributeError for a layer without them."""
        bias = getattr(self, "position_bias", None)
        if isinstance(bias, FirstSharedBias):
            return bias.of_stack
        if not isinstance(bias, RelativeBias):
            raise AttributeError("this layer has no weights of a relative position bias")
        return bias

    @property
    def relative_attention_num_buckets(self) -> int:
        """The number of buckets of distances."""
        return self.rel_pos_bias.cfg.n_buckets

    @property
    def relative_attention_max_distance(self) -> int:
        """The distance from which on all have one bucket."""
        return self.rel_pos_bias.cfg.max_distance

    def compute_relative_attention_bias(
        self, query_length: int, key_length: int, device: torch.device | str | None = None
    ) -> Float[Tensor, "1 head query_pos key_pos"]:
        """The bias of the scores of these numbers of queries and keys, for `position_bias`; on the weights' device by default.

        >>> from hooked_lm import HookedEncoderDecoder
        >>> cfg = dict(
        ...     n_layers=2,
        ...     d_model=8,
        ...     n_heads=2,
        ...     n_ctx=32,
        ...     d_vocab=10,
        ...     act_fn="relu",
        ...     decoder_start_token_id=0,
        ... )
        >>> attn = HookedEncoderDecoder(cfg).encoder[0].attn
        >>> attn.compute_relative_attention_bias(3, 4).shape
        torch.Size([1, 2, 3, 4])
        """
        return self.rel_pos_bias.between(query_length, key_length).to(device)

    # ---- tables ------------------------------------------------------------------------------------------------------

    @property
    def mask(self) -> Bool[Tensor, "query_pos key_pos"]:
        """An empty table: masks are computed for each run."""
        return torch.empty(0, 0, dtype=torch.bool, device=next(self.parameters()).device)

    @mask.setter
    def mask(self, table: Tensor) -> None:
        expected = self.visible_keys(len(table)).to(table.device)
        if table.shape != expected.shape or not torch.equal(table.bool(), expected):
            raise ValueError(
                "attn.mask: only the layer's present mask can be assigned; to hide keys, pass attention_mask to the model or "
                "edit hook_attn_scores"
            )

    @property
    def IGNORE(self) -> Float[Tensor, ""]:
        """The score of a masked key."""
        return next(self.parameters()).new_tensor(-torch.inf)

    @IGNORE.setter
    def IGNORE(self, value: Tensor | float) -> None:
        if float(value) != -torch.inf:
            raise ValueError(
                f"attn.IGNORE: masked scores are minus infinity, not {float(value)}; to change them, edit hook_attn_scores"
            )

    @property
    def rotary_sin(self) -> Float[Tensor, "pos rotary_dim"]:
        """The sines of the rotary embedding; AttributeError without one."""
        return self._rotary_tables(self.settings.rotary_table_length)[1]

    @rotary_sin.setter
    def rotary_sin(self, table: Tensor) -> None:
        self._check_table("rotary_sin", table, self._rotary_tables(len(table))[1])

    @property
    def rotary_cos(self) -> Float[Tensor, "pos rotary_dim"]:
        """The cosines of the rotary embedding; AttributeError without one."""
        return self._rotary_tables(self.settings.rotary_table_length)[0]

    @rotary_cos.setter
    def rotary_cos(self, table: Tensor) -> None:
        self._check_table("rotary_cos", table, self._rotary_tables(len(table))[0])

    def _rotary_tables(self, n_pos: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each rotated feature."""
        cos, sin = tables(rotary_of(self.cfg), n_pos, self.W_O.device)
        return cos.to(self.W_O.dtype), sin.to(self.W_O.dtype)

    @staticmethod
    def _check_table(name: str, table: Tensor, expected: Tensor) -> None:
        if table.shape != expected.shape or not torch.allclose(table.to(expected), expected, rtol=0, atol=1e-3):
            raise ValueError(
                f"attn.{name}: only the layer's present table can be assigned; the rotary embedding is attn.cfg.rotary, and its "
                "outputs can be edited at hook_rot_q and hook_rot_k"
            )

    # ---- the state dict ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in CONSTANTS:
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        constants = {prefix + name for name in CONSTANTS}
        # grouped keys and values, as other libraries save them
        grouped = {f"{prefix}_{name}": prefix + name for name in ("W_K", "W_V", "b_K", "b_V")}
        given = {grouped.get(k, k): v for k, v in state_dict.items() if k not in constants}
        for name in ("rotary_sin", "rotary_cos") if getattr(self.cfg, "rotary", None) is not None else ():
            if (table := given.pop(prefix + name, None)) is not None:
                setattr(self, name, table)  # refuses another table
        super()._load_from_state_dict(given, prefix, *args)
