"""Faults in hooks and caches."""

from tests.mutants.mutant import mutants

# fmt: off
HOOKS = mutants({
    "hooks/scope.py": [
        ("hooks stay at their points after the block", "hooks/test_scope.py",
         "            point.uninstall(frame)\n", "            pass\n"),
        ("hooks of add_hook with a level stay after the block", "hooks/test_scope.py",
         "if level is not None:\n            for point", "if level is None:\n            for point"),
        ("a frame that was closed stays open in its context", "hooks/test_scope.py",
         "if f is not frame))", "if f is frame))"),
    ],
    "hooks/point.py": [
        ("what a hook returns is ignored", "hooks/test_point.py",
         "            value = hook(value, self)\n", "            hook(value, self)\n"),
        ("the gradient that a backward hook returns is ignored", "hooks/test_point.py",
         "gradient = gradient if hook.records else new", "gradient = gradient"),
        ("backward hooks get the gradient of the value before the forward hooks", "hooks/test_point.py",
         "if gradient_hooks and torch.is_grad_enabled()", "if gradient_hooks and not torch.is_grad_enabled()"),
        ("hooks that come before all others run after them", "hooks/test_point.py",
         'if hook.when == "pre"]:', 'if hook.when != "pre"]:'),
        ("a recorder counts as an edit", "engine/test_both_stacks.py engine/test_study.py",
         'any(hook.dir == "bwd" or not hook.records', 'any(hook.dir == "bwd" or hook.records'),
        ("a reset removes permanent hooks", "hooks/test_point.py hooks/test_module.py",
         "(hook.is_permanent and not including_permanent)", "(hook.is_permanent and including_permanent)"),
        ("copies of a model keep the hooks of open scopes", "hooks/test_scope.py hooks/test_point.py",
         '"_hooks": {None: by_hand} if by_hand else {}}', '"_hooks": self._hooks}'),
        ("hooks that listen compute on a tensor that the model still uses", "hooks/test_replaced_points.py hooks/test_own_forward.py",
         "return point(x.clone()) if is_listening(point)", "return point(x) if is_listening(point)"),
    ],
    "hooks/values.py": [
        ("an edit in place reaches the model's own tensor", "hooks/test_point.py",
         "        return value.clone()\n", "        return value.detach()\n"),
        ("a recorder keeps a weight that training changes", "hooks/test_cache.py hooks/test_point.py",
         "(not is_read_only or _is_weight(value))", "(not is_read_only)"),
    ],
    "hooks/hook.py": [
        ("a hook that is prepended runs last", "hooks/test_point.py",
         "-self.id if prepend else self.id", "self.id"),
        ("a hook may return another dtype", "hooks/test_point.py",
         "if expected is not None and spec_of(value) != expected", "if expected is not None and value.shape != expected[0]"),
    ],
    "hooks/module.py": [
        ("a bare cache has the sites on demand", "hooks/test_cache.py hooks/test_module.py",
         "return not point.on_demand", "return True"),
        ("the gradients of a cache lack their suffix", "hooks/test_cache.py",
         'pos_slice, suffix="_grad")', "pos_slice)"),
        ("the option clear_contexts is ignored", "hooks/test_scope.py",
         "return Scope(self, fwd_hooks, bwd_hooks, not reset_hooks_end, clear_contexts)",
         "return Scope(self, fwd_hooks, bwd_hooks, not reset_hooks_end, False)"),
    ],
    "hooks/select.py": [
        ("names are selected in the order of the filter", "hooks/test_select.py",
         "return [name for name in names if name in found]", "return list(found)"),
        ("a glob that matches nothing is silent", "hooks/test_select.py",
         "        if not found:\n            raise unknown(site, names)\n        return found", "        return found"),
    ],
    "hooks/slice.py": [
        ("an int of pos_slice loses its axis", "hooks/test_slice.py hooks/test_cache.py",
         "return cls([made.slice]) if isinstance(made.slice, int) else made", "return made"),
        ("a slice of a list may be out of range by one", "hooks/test_slice.py",
         "if not -length <= i < length):", "if not -length <= i <= length):"),
    ],
    "hooks/indices.py": [
        ("negative indices do not count from the end", "interventions/test_indices.py",
         "return [i % n for i in numbers]", "return [abs(i) for i in numbers]"),
    ],
    "hooks/cache.py": [
        ("the device of a cache is ignored", "hooks/test_cache.py",
         "self.cache[name] = value if self.device is None else self._moved(value)", "self.cache[name] = value"),
        ("a cached slice keeps the whole value alive", "hooks/test_cache.py",
         'return value.clone() if self.pos_slice.mode == "slice" else value', "return value"),
        ("recomputations of checkpoints overwrite the cache", "hooks/test_checkpoint.py",
         "if not self.suffix and checkpoint.is_recomputing():", "if self.suffix and checkpoint.is_recomputing():"),
        ("a cache for another model loads without a warning", "models/caches/test_activation_cache.py::another_model",
         "if saved.get(name, value) != value\n", "if saved.get(name, value) == value and False\n"),
        ("shared memory of a cache is counted twice", "hooks/test_cache.py",
         "storages = {v.untyped_storage().data_ptr():", "storages = {id(v):"),
    ],
    "hooks/generation_step.py": [
        ("padding counts in the positions of a step", "models/generation/test_generate_positions.py::padding",
         "self.real.long().cumsum(1) - 1", "torch.ones_like(self.real.long()).cumsum(1) - 1"),
        ("gradients stay off after a generation", "models/generation/test_generate.py::stream models/generation/test_generate_positions.py::unfinished",
         "        torch.set_grad_enabled(grad_mode)\n", "        pass\n"),
    ],
    "hooks/checkpoint.py": [
        ("recomputations run without the hooks of their forward pass", "hooks/test_checkpoint.py",
         "else _records.get(calls.recomputed)", "else None"),
    ],
})
