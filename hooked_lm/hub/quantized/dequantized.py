"""A checkpoint of quantised weights as one of ordinary weights."""

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from hooked_lm.hub.config_checks import naming
from hooked_lm.hub.quantized.format import Format, Header
from hooked_lm.hub.renamed import Renamed
from hooked_lm.models.weights.kept import Kept, Raw
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from hooked_lm.weights.loading import dtype_of, shape_of
from hooked_lm.weights.shards import Headers


class Dequantized(Headers):
    """The tensors of a checkpoint, with one weight in the place of the tensors that hold it.

    A look-up reads these and computes the weight. Nothing is kept: only one weight at a time is in memory twice. `dtype`
    is that of the weights whose format leaves it open; `unused` are globs of tensors that the weights do not depend on.

    With `keep`, a look-up gives a `QuantizedWeight` in `dtype` that holds these tensors. `looked_up` are the weights read.

    Of a weight of which a part is missing the other parts remain, for which no model has a parameter. Of several formats that
    fit, the first counts.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        formats: Iterable[Format],
        dtype: torch.dtype,
        unused: Collection[str] = (),
        keep: bool = False,
    ) -> None:
        self._tensors, self._dtype, self._keep = tensors, dtype, keep
        self.looked_up = set[str]()
        self._headers = dict[str, Header]()
        self._formats = dict[str, tuple[Format, Renamed]]()
        held = set[str]()
        for kind in formats:
            stems = (name.removesuffix(kind.parts[0]) for name in tensors if name.endswith(kind.parts[0]))
            for stem in stems:
                if stem + kind.weight not in self._formats and all(stem + ending in tensors for ending in kind.parts):
                    raw = {ending: stem + ending for ending in (*kind.parts, *kind.more) if stem + ending in tensors}
                    self._formats[stem + kind.weight] = kind, Renamed(tensors, raw)
                    held |= {*raw.values()}
        plain = (name for name in tensors if name not in held and not any(fnmatch.fnmatchcase(name, g) for g in unused))
        self._names = dict.fromkeys((*plain, *self._formats))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._formats:
            return self._tensors[name]
        kind, raw = self._formats[name]
        self.looked_up.add(name)
        with naming(f"the quantised weight {name!r}"):
            return _kept(name, kind, raw, self._dtype) if self._keep else kind.value(raw, self._dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; of a quantised weight that of its values."""
        return self._header(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; of a quantised weight that of its values."""
        return self._header(name)[1]

    def _header(self, name: str) -> Header:
        if name not in self._formats:
            return shape_of(self._tensors, name), dtype_of(self._tensors, name)
        if name not in self._headers:
            kind, raw = self._formats[name]
            with naming(f"the quantised weight {name!r}"):
                self._headers[name] = kind.header(raw, self._dtype)
        return self._headers[name]

    def __contains__(self, name: object) -> bool:  # that of Mapping would look the tensor up
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _kept(name: str, kind: Format, raw: Renamed, dtype: torch.dtype) -> QuantizedWeight:
    """A weight that holds its tensors; nothing is computed."""
    shape, _ = kind.header(raw, dtype)
    stored = shape[::-1] if kind.transposed else shape
    strided = torch.empty(stored, dtype=dtype, device="meta")
    kept = Kept(type(kind).__name__, partial(_values, name, kind, dtype), dict(raw), stored, dtype)
    return QuantizedWeight(kept, strided.T if kind.transposed else strided, name)


def _values(name: str, kind: Format, dtype: torch.dtype, raw: Raw) -> Tensor:
    """The values of a weight that holds these tensors, contiguous, with the axes that they have in memory."""
    with naming(f"the quantised weight {name!r}"):
        weight = kind.value(Renamed(raw, {ending: ending for ending in raw}), dtype).to(dtype)
    return (weight.T if kind.transposed else weight).contiguous()
