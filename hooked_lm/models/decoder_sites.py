"""Runs of a decoder that keep what passes its sites, and the setters of what a bare cache holds."""

from typing import Any

from hooked_lm.hooks import NamesFilter
from hooked_lm.hooks.select import Site
from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.stack import follow_flags


class DecoderSites(BaseModel):
    """`run_with_cache` of a decoder, which stops early where it can, and the setters of its flags."""

    cfg: HookedTransformerConfig
    blocks: Any

    def run_with_cache(  # type: ignore[override]
        self,
        input: Any,
        return_type: str | None = "logits",
        *model_args: Any,
        names_filter: NamesFilter = None,
        stop_at_layer: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward pass, and an ActivationCache of what it left at the points that `names_filter` selects.

        With `return_type=None` and a filter the run stops after the last layer that it, or an open hook, needs. See
        `HookedRootModule.run_with_cache` for the other arguments.
        """
        early = return_type is None and stop_at_layer is None
        if early and names_filter is not None and kwargs.get("past_kv_cache") is None:
            stop_at_layer = self._last_layer_needed(names_filter)
        if model_args:
            model_args = (return_type, *model_args)
        elif return_type != "logits":  # a subclass's forward need not know what is not asked for
            kwargs["return_type"] = return_type
        if stop_at_layer is not None:
            kwargs["stop_at_layer"] = stop_at_layer
        output, cache = super().run_with_cache(input, *model_args, names_filter=names_filter, **kwargs)
        return (None if early else output), cache

    def _last_layer_needed(self, names_filter: Site) -> int | None:
        """The bound of the blocks to run for these sites and for all hooks; None if something comes after the blocks."""
        stop = 0
        for point in {*self.points(names_filter), *(p for p in self.hook_points() if p.is_listening)}:
            head, *rest = (point.name or "").split(".")
            if head == "blocks":
                stop = max(stop, int(rest[0]) + 1)
            elif head in ("ln_final", "unembed"):
                return None
        return stop

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether a cache without a filter holds `hook_result`."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether a cache without a filter holds `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether a cache without a filter holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether a cache without a filter holds `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether keys and values of a grouped-query model are made once for each query head, [batch, pos, head, ...]."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention
        follow_flags(self)
