"""`Transcode`: splices a transcoder, or the transcoders of several layers, into the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.indices import Indices
from hooked_lm.interventions.dictionaries.hook import Dictionary, Edit, _Read, decoded
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders
from hooked_lm.interventions.per_thread import PerThread


class _Layer(NamedTuple):
    """What was read at a layer in this forward pass, and its features after the edit."""

    read: _Read
    edited: Tensor | None = None  # until the layer's output is reached


@dataclass(eq=False, repr=False)
class Transcode(Dictionary):
    """Splices a transcoder into the model: encodes the value of one site, and replaces another by the decoded features.

    Transcoders of several layers (`TranscoderSet`, `CrossLayerTranscoder`) are spliced all at once: each layer reads what those
    before it have changed, and the features of a cross-layer transcoder are kept until the outputs to which they write.

    Args:
        hook_point: the full names of the two sites, [input, output]; by default those in the dictionary's config. For an MLP:
            ["blocks.3.mlp.hook_in", "blocks.3.hook_mlp_out"]. Transcoders of several layers have the sites in their configs.
        sae, error: as for `Dictionary`; the error is the difference of the output site's value and the transcoder's output.
        feature, edit: as for `Dictionary`; of several layers by the number of the layer, `feature={2: 17}`.

    Raises ValueError unless there are two sites, and if the second is computed before the first.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.dictionaries import Transcoder
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> transcoder = Transcoder.Config(d_in=128, d_sae=512).build().to(model.device)
    >>> splice = Transcode(
    ...     ["blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"], sae=transcoder, error="drop"
    ... )
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[splice])
    """

    _read_now: PerThread[dict[int, _Layer]] = field(default_factory=lambda: PerThread(dict), init=False)

    def forget(self) -> None:
        super().forget()
        self._read_now.value.clear()

    def _own_site(self) -> Any:
        if isinstance(self.sae, LayerTranscoders):
            return [*self.sae.sites, *self.sae.sites_out]
        cfg = getattr(self.sae, "cfg", None)
        return [site for name in ("hook_point", "hook_point_out") if (site := getattr(cfg, name, None))]

    def _check_sites(self) -> None:
        sites, several = self.hook_point, isinstance(self.sae, LayerTranscoders)
        if several and sites != self._own_site():
            raise ValueError(f"transcoders of several layers have the sites in their configs, got hook_point={sites!r}")
        self._check_layers()
        if several:
            return
        if not isinstance(sites, (list, tuple)) or len(sites) != 2 or self.layer is not None or sites[0] == sites[1]:
            raise ValueError(
                f"a transcoder has two sites by full name, [read, written], and no layer; got {sites!r}, layer {self.layer}"
            )

    def _check_layers(self) -> None:
        """Raises ValueError for an edit by layers of one transcoder, or of another layer than there is."""
        several = isinstance(self.sae, LayerTranscoders)
        for name, of in (("edit", self.edit), ("feature", self.feature)):
            if of is not None and isinstance(of, Mapping) != several:
                how = "by the number of the layer, such as {2: 17}" if several else "not by layer"
                raise ValueError(f"{name} of a {type(self.sae).__name__} is given {how}; got {of!r}")
            if isinstance(of, Mapping) and (strange := {*of} - {*self.sae.layers}):
                raise ValueError(f"{self.sae!r} has no layer {min(strange)}: its layers are {list(self.sae.layers)}")

    def change(self, value: Tensor, hook: HookPoint) -> Any:
        sites: list[str] = list(self.hook_point)  # type: ignore[arg-type]
        half, name, now = len(sites) // 2, str(hook.name), self._read_now.value
        if name in sites[:half]:
            place = sites.index(name)
            if any(other >= place for other in now):  # of a forward pass that was interrupted
                now.clear()
            now[place] = _Layer(self._encoded(value, hook, sites[half + place]))
            return None
        return self._written(sites.index(name) - half, value, hook)

    def _written(self, target: int, value: Tensor, hook: HookPoint) -> Tensor:
        """The new value of an output site."""
        now, sites = self._read_now.value, self.hook_point
        sources = self.sae.sources(target) if isinstance(self.sae, LayerTranscoders) else [0]
        if missing := [source for source in sources if source not in now]:
            raise ValueError(
                f"'{hook.name}' is computed before what it should be made of, '{sites[missing[0]]}': "  # type: ignore[index]
                "give [read, written], and run the layers from the first one on"
            )
        read = now[target].read
        for source in sources:
            known = now[source]
            if known.edited is None:
                now[source] = _Layer(known.read, self._edited(known.read.watched, hook, *self._edit_of(source)))
        parts = [now[source] for source in sources]
        edited = [part.edited for part in parts if part.edited is not None]
        if target == len(sites) // 2 - 1:  # type: ignore[arg-type]
            now.clear()
        return self._replaced(
            value, hook, [part.read for part in parts], edited, lambda features: self._made(target, features, read.x)
        )

    def _edit_of(self, place: int) -> tuple[Edit | None, Indices]:
        """The edit of a layer's features, and those that are chosen."""
        if not isinstance(self.sae, LayerTranscoders):
            return self.edit, self.feature  # type: ignore[return-value]
        layer = self.sae.layers[place]
        edit, chosen = (of.get(layer) if isinstance(of, Mapping) else None for of in (self.edit, self.feature))
        return edit, chosen  # type: ignore[return-value]

    def _made(self, target: int, features: Sequence[Tensor], x: Tensor) -> Tensor:
        """The reconstruction of an output site from the features of the layers that write there."""
        if isinstance(self.sae, LayerTranscoders):
            return self.sae.output(target, features, x)
        return decoded(self.sae, features[0], x)
