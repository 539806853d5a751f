"""Path patching: the effect of a head or MLP on others along direct paths (Wang et al. 2022, arXiv:2211.00593; Goldowsky-Dill
et al. 2023, arXiv:2304.05969)."""

import os
import re
from collections.abc import Sequence
from itertools import product

from torch import Tensor

from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.edit import Cell, Edit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong, pair_of, prompts_and_metric
from hooked_lm.engine.prompts import Prompts, site_of_layer, values_of
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.engine.study import Metrics, Study, SweepInterrupted
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.head_labels import head_label
from hooked_lm.models.checks import check_equal_heads
from hooked_lm.renamed import renamed
from hooked_lm.results import Label
from hooked_lm.results.groups import Groups

Sender = str | tuple[int, int | str]  # "L1H7" or "m1", or (layer, head) or (layer, "mlp")
Receiver = Sender | tuple[int, int, str]  # "L1H7<q>", or (layer, head, "q"); a head without a letter: all three
LABEL = re.compile(r"L(?P<layer>\d+)H(?P<head>\d+)(<(?P<input>[qkv])>)?|m(?P<mlp>\d+)")
PlacedSenders = Sequence[tuple[Sender, tuple[int, ...]]]  # senders, each with its index in the grid
INPUTS = ("q", "k", "v")
JOINED = "patching paths between heads"  # what was changed


@renamed(checkpoint="resume_file")
@keeps_torch_state
@reads_chats
def path_patch(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    receivers: str | Sequence[Receiver] | None = None,
    senders: str | Sequence[Sender] = "heads",
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    freeze: str = "attention",
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Patch each sender's clean output into the inputs of the receivers only.

    Each sender takes two runs. In the first, its output is that of the clean run, and the outputs of all later attention
    (with freeze="all" also of MLPs) are frozen at their corrupted values, so that the receivers get the change from the sender
    directly or through MLPs. In the second, the receivers' inputs of the first run are patched into the corrupted run.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape; `VisionInputs` for a model that reads images. Or `Pairs`
            in place of both.
        receivers: a list of inputs of heads such as "L3H0<q>", "L3H0" for all three, and MLPs such as "m3", patched together.
            With grouped-query attention "k" and "v" are those of the head's key/value head. Or "logits": only the first run,
            whose logits are measured. Tuples mean the same: (3, 0, "q"), (3, 0), (3, "mlp").
        senders: "heads" (all heads), "mlps", or a list of heads and MLPs such as ["L1H7", "m0"].
        freeze: "attention" recomputes MLPs, "all" freezes them too.
        metric, answers, groups, max_memory, progress, resume_file: as for `sweep`.

    Returns a SweepResult with the axes layer and head, layer, or sender; a sender without a path to a receiver has the value of
    the corrupted run. Raises ValueError for an empty list, an unknown word, and a receiver without such an input; IndexError
    for a layer or head that does not exist.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> result = patching.path_patch(
    ...     model, corrupted, clean, receivers=["L3H0<q>"], metric=answers
    ... )
    >>> result.mean.shape == (model.cfg.n_layers, model.cfg.n_heads)
    True
    """
    corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
    if receivers is None:
        raise TypeError("receivers is missing: give a list such as ['L3H0<q>', 'm3'], or 'logits'")
    paths = Paths(model, corrupted, clean, freeze, max_memory)
    axes, places = _senders(model, senders)
    if isinstance(receivers, str):
        if receivers != "logits":
            raise ValueError(f"receivers must be 'logits' or a list, got {receivers!r}")
        cells = {place: paths.cell(sender) for sender, place in places}
    else:
        cells = paths.to_inputs(places, receivers)
    study = Study(axes, cells, title="patching paths")
    return study.carry_out(model, paths.tokens, metric, paths.clean, max_memory, progress, resume_file, groups)


@keeps_torch_state
@reads_chats
def head_to_head(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    freeze: str = "all",
    inputs: Sequence[str] = INPUTS,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> SweepResult:
    """Patch the path from every head to the queries, keys and values of every later head, one path at a time.

    Equals `path_patch` with one sender and one receiver per cell, for all pairs. Axes: input, layer and head of the sender
    ("from_layer", "from_head"), and of the receiver ("layer", "head"); NaN unless the receiver is in a later layer. With
    grouped-query attention the receivers of "k" and "v" are key/value heads, and the remaining entries of the head axis are
    NaN. Raises as `path_patch`; an interrupt raises SweepInterrupted with the partial result.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "Mary and John left, John", "Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> result = patching.head_to_head(
    ...     model, corrupted, clean, metric=answers, inputs=["q"], progress=False
    ... )
    >>> list(result.axes)
    ['input', 'from_layer', 'from_head', 'layer', 'head']
    """
    if not inputs or not set(inputs) <= set(INPUTS):
        raise ValueError(f"inputs must be some of {', '.join(INPUTS)}, got {list(inputs)}")
    corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
    paths = Paths(model, corrupted, clean, freeze, max_memory)
    n_layers, n_heads = _size(model)
    grid = {"from_layer": list(range(n_layers))}
    all_axes: dict[str, Sequence[Label]] = {"input": list(inputs), **grid, "from_head": list(range(n_heads))}
    all_axes |= {"layer": list(range(n_layers)), "head": list(range(n_heads))}
    parts: list[SweepResult] = []
    try:
        for layer in range(n_layers):
            axes = {**all_axes, "from_layer": [layer]}
            study = Study(axes, paths.pairs(layer, inputs), title=f"paths from layer {layer}")
            if study.cells:
                runs = paths.tokens, metric, paths.clean
                parts.append(study.carry_out(model, *runs, max_memory, progress, groups=groups))
    except SweepInterrupted as interrupt:
        raise SweepInterrupted(SweepResult.joined([*parts, interrupt.result], JOINED, grid)) from None
    return SweepResult.joined(parts, JOINED, grid)


class Paths:
    """The clean and corrupted values for path patching, and the cells that patch a path."""

    def __init__(
        self,
        model: HookedRootModule,
        corrupted: Prompts,
        clean: Prompts | None,
        freeze: str,
        max_memory: int | str = "auto",
    ) -> None:
        refuse_two_stacks(model, "path patching")
        if freeze not in ("attention", "all"):
            raise ValueError(f"freeze must be 'attention' or 'all', got {freeze!r}")
        self.model, self.freeze = model, freeze
        self.tokens, self.clean = pair_of(model, corrupted, clean)
        self.n_layers, self.n_heads = _size(model)
        self.sites = {
            (name, layer): site
            for name, layer in product(
                ("z", "attn_out", "mixer_out", "mlp_out", *INPUTS, "mlp_in"), range(self.n_layers)
            )
            if (site := site_of_layer(model, name, layer)) is not None
        }
        self.experiment = Experiment(model, self.tokens, [_unused_metric], max_memory=max_memory)
        self.clean_values = values_of(model, self.clean, self._named("z", "mlp_out"))
        between = self._named("attn_out", "mixer_out", *(["mlp_out"] if freeze == "all" else []))
        self.frozen = values_of(model, self.tokens, between)

    def _named(self, *names: str) -> list[str]:
        return [site for (name, _), site in self.sites.items() if name in names]

    def inputs(self, receiver: Receiver) -> list[tuple[str, tuple[int, ...]]]:
        """The input sites of a receiver, each with the index of its head, () for an MLP."""
        receiver = _parts(receiver)
        layer, part = self._layer(receiver[0]), receiver[1]
        if isinstance(part, str):
            return [(self._site("mlp_in" if part == "mlp" else part, layer), ())]
        kinds = INPUTS if len(receiver) == 2 else (str(receiver[2]),)
        if not set(kinds) <= set(INPUTS):
            raise ValueError(f"a head receives through q, k or v, got {kinds[0]!r}")
        head = _in_range(part, self.n_heads, "head")
        return [(site := self._site(kind, layer), (self._head_there(site, head),)) for kind in kinds]

    def _site(self, name: str, layer: int) -> str:
        if (name, layer) not in self.sites:
            raise ValueError(f"layer {layer} has no site '{name}', so it cannot be a receiver there")
        return self.sites[name, layer]

    def _layer(self, layer: int) -> int:
        return _in_range(layer, self.n_layers, "layer")

    def _head_there(self, site: str, head: int) -> int:
        """The index of a head at a site; at `k` and `v` sites that of its key/value head."""
        if "kv_head" not in self.model.hook_dict[site].dims:
            return head
        return head * self.n_kv(site) // self.n_heads

    def n_kv(self, site: str) -> int:
        """The number of heads at a site of queries, keys or values."""
        attn = self.model.blocks[self.model.hook_dict[site].layer()].attn
        return attn.n_kv if "kv_head" in self.model.hook_dict[site].dims else self.n_heads

    def cell(self, sender: Sender) -> Cell:
        """Edits that set the sender's output to its clean value, and freeze later outputs (see `freeze`) at corrupted values."""
        number, part, *_ = _parts(sender)
        layer = self._layer(number)
        is_mlp = part == "mlp"
        rest = () if isinstance(part, str) else (_in_range(part, self.n_heads, "head"),)
        name = "mlp_out" if is_mlp else "z"
        if (name, layer) not in self.sites or (isinstance(part, str) and not is_mlp):
            raise ValueError(f"layer {layer} has no output {part!r}, so it cannot be a sender")
        site = self.sites[name, layer]
        cell: list[Edit] = [Edit(site, self.clean_values[site], None, rest)]
        for (between, later), frozen in self.sites.items():
            comes_later = later > layer or (later == layer and between == "mlp_out" and not is_mlp)
            if frozen in self.frozen and comes_later:
                cell.append(Edit(frozen, self.frozen[frozen]))
        return cell

    def to_inputs(self, places: PlacedSenders, receivers: Sequence[Receiver]) -> dict[tuple[int, ...], Cell]:
        """For each sender, the edits of the receivers' inputs in the second run."""
        inputs = [found for receiver in receivers for found in self.inputs(receiver)]
        if not inputs:
            raise ValueError("receivers is empty: name at least one")
        captured = self.captured([sender for sender, _ in places], [site for site, _ in inputs])
        return {
            place: [Edit(site, values[site], None, rest) for site, rest in inputs if site in values]
            for (_, place), values in zip(places, captured, strict=True)
        }

    def captured(self, senders: Sequence[Sender], sites: Sequence[str]) -> list[dict[str, Tensor]]:
        """For each sender, the values at `sites` in the first run; sites that the sender does not affect are left out."""
        names = list(dict.fromkeys(sites))
        return self.experiment.capture([self.cell(sender) for sender in senders], names)[1]

    def pairs(self, layer: int, inputs: Sequence[str]) -> dict[tuple[int, ...], Cell]:
        """The cells of all paths from the heads of a layer, by input, sender and receiver.

        Keys: (index in `inputs`, 0, sender's head, receiver's layer, receiver's head).
        """
        later = range(layer + 1, self.n_layers)
        sites = {
            (i, to_layer): self.sites[kind, to_layer]
            for (i, kind), to_layer in product(enumerate(inputs), later)
            if (kind, to_layer) in self.sites
        }
        if ("z", layer) not in self.sites or not sites:
            return {}
        cells: dict[tuple[int, ...], Cell] = {}
        for head, values in enumerate(
            self.captured([(layer, head) for head in range(self.n_heads)], list(sites.values()))
        ):
            for (i, to_layer), site in sites.items():
                for to_head in range(values[site].shape[2]) if site in values else ():
                    cells[i, 0, head, to_layer, to_head] = [Edit(site, values[site], None, (to_head,))]
        return cells


def _senders(model: HookedRootModule, senders: str | Sequence[Sender]) -> tuple[dict[str, list[Label]], PlacedSenders]:
    """The axes of the senders, and each sender with its index in the grid."""
    n_layers, n_heads = _size(model)
    layers = list(range(n_layers))
    if isinstance(senders, str):
        if senders not in ("heads", "mlps"):
            raise ValueError(f"senders must be 'heads', 'mlps' or a list, got {senders!r}")
        name = "z" if senders == "heads" else "mlp_out"
        there = [layer for layer in layers if site_of_layer(model, name, layer) is not None]
        if senders == "mlps":
            return {"layer": list(layers)}, [((layer, "mlp"), (layer,)) for layer in there]
        heads = range(n_heads)
        return {"layer": list(layers), "head": list(heads)}, [(both, both) for both in product(there, heads)]
    if not senders:
        raise ValueError("senders is empty: name at least one")
    return {"sender": [_label(sender) for sender in senders]}, [(s, (i,)) for i, s in enumerate(senders)]


def _parts(node: Receiver) -> tuple[int, int | str] | tuple[int, int, str]:
    """The tuple of a sender or receiver: (layer, head), (layer, head, "q") or (layer, "mlp")."""
    if not isinstance(node, str):
        return node
    if (found := LABEL.fullmatch(node)) is None:
        raise ValueError(f"{node!r} is neither a head such as 'L1H7' or 'L1H7<q>' nor an MLP such as 'm1'")
    if found["mlp"] is not None:
        return int(found["mlp"]), "mlp"
    layer, head = int(found["layer"]), int(found["head"])
    return (layer, head) if found["input"] is None else (layer, head, found["input"])


def _label(sender: Sender) -> str:
    layer, part, *_ = _parts(sender)
    return head_label(layer, part) if isinstance(part, int) else f"m{layer}"


def _size(model: HookedRootModule) -> tuple[int, int]:
    check_equal_heads(model, "path patching")
    return model.cfg.n_layers, model.cfg.n_heads


def _in_range(index: int, size: int, what: str) -> int:
    if not -size <= index < size:
        raise IndexError(f"{what} {index} is out of range: there are {size}, so {-size} to {size - 1}")
    return index % size


def _unused_metric(logits: Tensor) -> Tensor:
    """The metric of a run whose logits are not used."""
    return logits[:, -1, 0]
