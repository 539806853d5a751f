"""Faults in the engine, in patching, and in interventions."""

from tests.mutants.mutant import mutants

# fmt: off
ENGINE = mutants({
    "engine/edit.py": [
        ("an edit of some rows changes all", "engine/test_properties.py engine/test_capture.py",
         "rows: Any = slice(None) if self.rows is None else self.rows", "rows: Any = slice(None)"),
        ("positions of an edit are shifted within a part", "engine/test_properties.py::plain_loop",
         "source[(rows, slice(first, stop), *self.rest)]", "source[(rows, slice(first - start, stop - start), *self.rest)]"),
        ("an edit of one head covers the whole site", "engine/test_partial_blocks.py",
         "return self.rest == () and (self.positions is None", "return (self.positions is None"),
        ("cells that are repeated change their order", "engine/test_properties.py::plain_loop",
         "return value.repeat(n, *[1] * (value.ndim - 1))", "return value.repeat_interleave(n, 0)"),
    ],
    "engine/schedule.py": [
        ("positions after a changed key are not computed", "engine/test_properties.py::plain_loop",
         "if changed_keys != NONE and not is_replaced:", "if changed_keys != NONE and is_replaced:"),
        ("the last layer computes one position too few", "engine/test_properties.py::plain_loop",
         "key_rows[1] - spans.key_rows[0]] for part", "key_rows[1] - spans.key_rows[0] - 1] for part"),
        ("edits of layers before the first change are lost", "engine/test_properties.py",
         "later = [edit for edit in edits if self.site_infos[edit.site].layer > layer]", "later = [edit for edit in edits if self.site_infos[edit.site].layer > layer + 1]"),
        ("an edit of the base run is not made in cells", "engine/test_properties.py::plain_loop engine/test_partial_blocks.py",
         "for edit in sorted((*base.edits, *cells[schedule.cell]),", "for edit in sorted(cells[schedule.cell],"),
        ("rows of a cell enter after attention though the base run changes there", "engine/test_partial_blocks.py",
         "self.entry_sites = base.kept.keys() - {edit.site for edit in base.edits}", "self.entry_sites = base.kept.keys()"),
    ],
    "engine/context.py": [
        ("a cell reads the keys of the base run", "engine/test_properties.py::plain_loop",
         "whole[:, :, start:stop] = own.view(", "whole[:, :, start:stop] = 0 * own.view("),
        ("queries of a part are rotated from position zero", "engine/test_properties.py::plain_loop",
         "of_base(cos, packing), self.of_base(sin, packing)", "of_base(cos.roll(1, 1), packing), self.of_base(sin.roll(1, 1), packing)"),
        ("a state-space layer starts from an empty state", "engine/test_properties.py::states engine/test_changed_states.py",
         "    entry.length = before.length\n    if before", "    entry.length = 0\n    if before"),
        ("padding of other rows masks a cell", "engine/test_properties.py engine/test_full_forward.py::padded",
         "return x if x.shape[0] == 1 else repeated(x, self.n_cells)", "return x if x.shape[0] == 1 else repeated(x[:1].expand_as(x), self.n_cells)"),
    ],
    "engine/budget.py": [
        ("a memory limit that is too small is ignored", "engine/test_budget.py",
         "if n_bytes > available and budget.is_user_set:", "if n_bytes > available and not budget.is_user_set:"),
        ("a megabyte has 1024 kilobytes", "engine/test_budget.py",
         "(1024 if is_binary else 1000)", "1024"),
    ],
    "engine/cost.py": [
        ("all experts count in the cost of a token", "engine/test_cost.py",
         "moe.cfg.top_k / moe.cfg.n_experts for moe", "1.0 for moe"),
    ],
    "engine/result.py": [
        ("an effect is measured from the clean run", "results/test_result.py engine/test_study.py",
         'return self.clean if self.base == "clean" and', "return self.clean if"),
        ("a share is scaled by the wrong baseline", "results/test_result.py",
         "return ((values.double() - start) / span).float()", "return ((values.double() - start) / (span + start)).float()"),
        ("baselines that may be equal are not mentioned", "engine/test_study.py results/test_result.py",
         "            if abs(mean) < two:\n", "            if abs(mean) < two / 2 and False:\n"),
    ],
    "patching/setters.py": [
        ("a head is patched at the position of its number", "patching/test_classic.py",
         "return _copy_part(corrupted_activation, clean_activation, slice(None), head)", "return _copy_part(corrupted_activation, clean_activation, head)"),
        ("the key of a pattern is chosen by the number of its head", "patching/test_classic.py",
         "tuple(index[axis] for axis in layout.rest)", "tuple(index[axis] for axis in reversed(layout.rest))"),
    ],
    "patching/classic.py": [
        ("the axes of patterns are not those of the other sweeps", "patching/test_classic.py",
         "return _stacked([*vectors, pattern.transpose(1, 2)])", "return _stacked([*vectors, pattern])"),
        ("missing heads count as zero", "patching/test_classic.py",
         'value=float("nan")) for r in results])', "value=0.0) for r in results])"),
    ],
    "patching/windows.py": [
        ("an even window has its longer side after the centre", "patching",
         "range(max(0, layer - window // 2), min(n_layers, layer + (window + 1) // 2))",
         "range(max(0, layer - (window - 1) // 2), min(n_layers, layer + window // 2 + 1))"),
    ],
    "patching/knockout.py": [
        ("the ends of an edge are exchanged", "patching/test_knockout.py",
         "edits = [Edit(self.sites[layer], masked, tuple(queries), rest)", "edits = [Edit(self.sites[layer], masked, tuple(keys), (rest[0], queries))"),
        ("an edge that leaves a query blind is accepted", "patching/test_knockout.py",
         "if bool((blind := ~left.any(-1).all(0)).any()):", "if bool((blind := ~left.any(-1).any(0)).all()):"),
    ],
    "patching/ablation.py": [
        ("a mean of prompts weighs each batch alike", "patching/test_ablation.py",
         "new, n_new / (n_seen + n_new))", "new, 1 / (1 + (n_seen > 0)))"),
        ("a prompt may be resampled by itself", "patching/test_ablation.py",
         "others = [row for row in fitting if not _are_equal(row, prompt)]", "others = list(fitting)"),
    ],
    "patching/paths.py": [
        ("the MLP of the sender's own layer is not frozen", "patching/test_paths.py",
         'later > layer or (later == layer and between == "mlp_out" and not is_mlp)', "later > layer"),
        ("grouped heads receive at the wrong key", "patching/test_paths.py",
         "return head * self.n_kv(site) // self.n_heads", "return head % self.n_kv(site)"),
    ],
    "interventions/controllers.py": [
        ("noise is the same at each position", "interventions/test_controllers.py",
         'f"{self.seed} {name} {position}"', 'f"{self.seed} {name}"'),
        ("a direction is not scaled to length one", "interventions/test_controllers.py interventions/test_steering.py",
         "vector = self.vector / self.vector.norm() if self.unit else self.vector", "vector = self.vector"),
        ("only the first direction is projected out", "interventions/test_controllers.py",
         "return value - (value @ basis.T) @ basis", "return value - (value @ basis[:1].T) @ basis[:1]"),
        ("a schedule repeats its first number", "interventions/test_controllers.py interventions/test_controllers_generating.py",
         "self.schedule[min(order, len(self.schedule) - 1)]", "self.schedule[order % len(self.schedule)]"),
        ("noise is not scaled by its row's deviation", "interventions/test_controllers.py",
         "return self.multiple * part.take(", "return part.take("),
    ],
})
