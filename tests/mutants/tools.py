"""Faults in what is built on models: dictionaries, analysis, harvests, studies, results, figures, loading and the command line."""

from tests.mutants.mutant import mutants

# fmt: off
TOOLS = mutants({
    "interventions/detectors.py": [
        ("a record keeps the oldest value over its limit", "interventions/test_detectors.py::caps",
         "gone = self._kept.pop(0)[1]", "gone = self._kept.pop()[1]"),
        ("the axis of steps is that of rows", "interventions/test_detectors.py::calls_of_several_shapes",
         "return torch.cat(values, dims.index(axis))", "return torch.cat(values, 0)"),
    ],
    "interventions/dictionaries/sae.py": [
        ("the bias of a decoder is not taken from the input", "interventions/dictionaries/test_formats.py::saelens_standard_of_before_its_version_six",
         "return (x - self.b_dec if self.cfg.subtract_b_dec else x) @ self.W_enc", "return x @ self.W_enc"),
        ("a decoder lacks its bias", "interventions/dictionaries/test_formats.py::saelens_standard_of_before_its_version_six",
         "return features @ self.W_dec + self.b_dec", "return features @ self.W_dec"),
    ],
    "interventions/dictionaries/architectures.py": [
        ("the gradient of a threshold has the wrong sign", "interventions/dictionaries/test_sae.py::the_gradient_of_a_threshold_is_the_rectangle_around_it",
         "each = -(threshold / ctx.bandwidth) * near * gradient", "each = (threshold / ctx.bandwidth) * near * gradient"),
        ("a threshold lets equal values pass in training alone", "interventions/dictionaries/test_formats.py::saelens_jumprelu_and_batchtopk",
         "return positive * (positive > self.threshold)", "return positive"),
        ("the magnitude of a gated feature includes the bias of its gate", "interventions/dictionaries/test_formats.py::saelens_gated",
         "self.r_mag.exp() * (hidden - self.b_gate) + self.b_mag", "self.r_mag.exp() * hidden + self.b_mag"),
    ],
    "interventions/steering.py": [
        ("a direction of length one is not", "interventions/test_steering.py::signs_units_and_layers",
         "return F.normalize(found, dim=0) if unit else found", "return found"),
    ],
    "interventions/store.py": [
        ("a run that was deleted can be written", "interventions/test_store.py::deleted_runs_are_gone",
         "        if not self.path.is_dir():\n            raise ValueError(f\"the run", "        if self.path.is_file():\n            raise ValueError(f\"the run"),
        ("a line that another process did not finish spoils the next", "interventions/test_store.py::after_a_torn_line_the_next_batch_is_read",
         'is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\\n"', "is_torn = False"),
        ("runs are sorted by their names", "interventions/test_store.py::runs_are_listed_in_the_order_of_their_starts",
         'key=lambda run: (run.about["started"], run.id))', "key=lambda run: run.id)"),
    ],
    "analysis/attribution/atp.py": [
        ("attribution by dropped layers forgets the sign", "analysis/attribution/test_attribution_methods.py::without_cancellation_dropping_changes_no_effect_on_the_stream",
         "torch.where(plain[s] < 0, -size, size) for s", "torch.where(plain[s] < 0, size, size) for s"),
        ("the patterns of exchanged queries are those of keys", "analysis/attribution/test_attribution_methods.py::a_saturated_head_is_seen_by_its_pattern_only",
         "wanted = [site for _, site in self._sites_of_layers(PATTERN if kind == \"q\" else SCORES)]", "wanted = [site for _, site in self._sites_of_layers(SCORES if kind == \"q\" else PATTERN)]"),
        ("the share of a sink is a key's", "analysis/attribution/test_attribution_methods.py::queries_and_keys_go_by_their_patterns",
         "others = _sum_of_others(share) + sink", "others = _sum_of_others(share)"),
    ],
    "analysis/attribution/gradients.py": [
        ("gradients are those of the mean over prompts", "analysis/attribution/test_gradients.py::finite_differences",
         "ones = torch.ones_like(self.scores)", "ones = torch.ones_like(self.scores) / len(self.scores)"),
        ("the gradient of a metric that is NaN is accepted", "analysis/attribution/test_gradients.py::metrics_that_do_not_do",
         "if gradient is not None and bool(gradient.sum().isnan())", "if gradient is None and bool(gradient.sum().isnan())"),
    ],
    "analysis/attribution/integrated.py": [
        ("integrated gradients weigh the ends of the path alike", "analysis/attribution/test_attribution_methods.py::nodes_integrate_polynomials",
         "torch.tensor((at + 1) / 2), torch.tensor(weights / 2)", "torch.tensor((at + 1) / 2), torch.full((steps,), 1 / steps, dtype=torch.float64)"),
        ("the path of integrated gradients starts at the source", "analysis/attribution/test_attribution_methods.py::effects_at_a_full_cut_add_up_to_the_whole_difference",
         "(value.unflatten(0, (len(shares), -1)) + scaled)", "(value.unflatten(0, (len(shares), -1)) - scaled)"),
    ],
    "analysis/circuits/acdc.py": [
        ("an edge whose removal lowers the metric is dropped", "analysis/circuits/test_circuit_search.py::acdc_is_trying_one_by_one",
         "(changes if self.runner.is_kl else changes.abs()) >= self.threshold", "changes >= self.threshold"),
        ("a change is measured from the whole model, not from the circuit so far", "analysis/circuits/test_circuit_search.py::acdc_is_trying_one_by_one",
         "changes = found - torch.cat([self.now[None], found[:-1]])", "changes = found - self.now"),
    ],
    "analysis/circuits/circuit.py": [
        ("the complement of a circuit has edges that do not exist", "analysis/circuits/test_circuits.py::random_circuits_are_a_baseline",
         "return replace(self, edges=self.graph.is_edge & ~self.edges)", "return replace(self, edges=~self.edges)"),
    ],
    "analysis/circuits/top.py": [
        ("edges are ranked by their signed scores", "analysis/circuits/test_circuit_search.py::the_largest_scores_fill_the_number_of_edges",
         "size = scores.abs().masked_fill(~graph.is_edge, torch.nan).flatten()", "size = scores.masked_fill(~graph.is_edge, torch.nan).flatten()"),
    ],
    "analysis/metrics.py": [
        ("a logit difference has the wrong sign", "analysis/test_metrics.py::logit_difference",
         "return (read[..., :n].mean(-1) - read[..., n:].mean(-1)).mean(1)", "return (read[..., n:].mean(-1) - read[..., :n].mean(-1)).mean(1)"),
        ("a divergence is that of the run from the reference", "analysis/test_metrics.py::kl_divergence",
         "return (p * (target - read.log_softmax(-1)))", "return (read.softmax(-1) * (read.log_softmax(-1) - target))"),
        ("a rank counts the token itself", "analysis/test_metrics.py::metrics_of_tokens",
         "above = (read > best).sum(-1)", "above = (read >= best).sum(-1)"),
        ("the loss of a prompt counts its padding", "analysis/test_metrics.py::loss_without_padding",
         "return losses.masked_fill(~counted, 0).sum(1) / counted.sum(1)", "return losses.mean(1) + 0 * counted.sum(1)"),
        ("a metric is computed in half precision", "analysis/test_metrics.py::narrow_logits_are_widened_before_anything_is_computed",
         "found = found if found.dtype in (torch.float32, torch.float64) else found.float()", "found = found + 0"),
    ],
    "analysis/probes.py": [
        ("the control of a probe has the right labels", "analysis/test_probes.py::a_planted_direction_is_found_and_noise_is_not",
         "task.held_out(x, targets, folds, regularisation) for targets in shuffled", "task.held_out(x, task.targets, folds, regularisation) for targets in shuffled"),
    ],
    "analysis/reading/lens.py": [
        ("a lens lacks the final norm", "analysis/reading/test_lens.py::the_last_layer_says_what_the_model_says",
         "normalized = norm_unhooked(norm_of(model, \"ln_final\"), stream[None]).to(model.embed.W_E.dtype)", "normalized = stream[None].to(model.embed.W_E.dtype)"),
        ("the divergence of a lens is from the model to the lens of another position", "analysis/reading/test_lens.py::every_number_is_that_of_the_formula",
         "kl = (own.exp() * (own - log_probs)).sum(-1)", "kl = (own.exp() * (own - log_probs)).sum(-1).roll(1)"),
        ("layers and positions of a lens are exchanged", "analysis/reading/test_lens.py::the_last_layer_says_what_the_model_says",
         "return rows.view(n_layers, batch, n_pos, -1).transpose(1, 2).contiguous()", "return rows.view(n_layers, n_pos, batch, -1).contiguous()"),
    ],
    "analysis/reading/head_detector.py": [
        ("attention to the first token counts though it is excluded", "analysis/reading/test_heads.py::detect_head_against_the_patterns",
         "        counts[:, 0] = False\n", "        counts[0, :] = False\n"),
    ],
    "analysis/reading/svd_interpreter.py": [
        ("singular vectors are those of the other side", "analysis/reading/test_svd.py::singular_vectors_are_those_of_the_matrix",
         "        _, S, V = FactoredMatrix(", "        V, S, _ = FactoredMatrix("),
    ],
    "harvest/rows.py": [
        ("a row of a long document lacks its BOS", "harvest/test_harvest.py::long_documents",
         "return [[*bos, *body[start : start + size]] for start in range(0, len(body), size)]", "return [[*body[start : start + size]] for start in range(0, len(body), size)]"),
        ("the last batch of rows is dropped", "harvest/test_harvest.py::is_a_loop_of_forward_passes",
         "for start in range(0, len(order), batch_size)]", "for start in range(0, len(order) - len(order) % batch_size or 1, batch_size)]"),
        ("padding of a batch is real", "harvest/test_harvest.py::an_encoder",
         "return tokens, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]", "return tokens, torch.arange(max(lengths)) <= torch.tensor(lengths)[:, None]"),
        ("special tokens are kept as text", "harvest/test_harvest.py::what_is_kept",
         "return torch.tensor([token not in special for token in row])", "return torch.tensor([token in special for token in row])"),
    ],
    "harvest/stored_value.py": [
        ("whole numbers of int8 are cut, not rounded", "harvest/test_harvest.py::types",
         "scale.where(scale > 0, torch.ones(()))).round()", "scale.where(scale > 0, torch.ones(()))).trunc()"),
    ],
    "harvest/shard.py": [
        ("rows of a batch are written in the order of the batch", "harvest/test_harvest.py::is_a_loop_of_forward_passes",
         "self.file.write(f\"{site}{ending}\", self.starts[row], tensor", "self.file.write(f\"{site}{ending}\", self.starts[which[0]] + at, tensor"),
    ],
    "harvest/shuffled.py": [
        ("the vectors of each epoch have the same order", "harvest/test_harvest.py::epoch",
         "manual_seed(self.seed + epoch)", "manual_seed(self.seed)"),
    ],
    "harvest/documents.py": [
        ("a stream that resumes skips a document", "harvest/test_documents.py::any_place",
         "for _ in zip(range(start), reader, strict=False):", "for _ in zip(reader, range(start), strict=False):"),
    ],
    "shards/run.py": [
        ("a part computes each shard", "harvest/test_interrupted.py::parts_together_are_the_whole", "        shard += n\n", "        shard += 1\n"),
    ],
    "shards/plan.py": [
        ("a plan's hash ignores its settings", "harvest/test_interrupted.py::other_weights_are_another_harvest",
         "hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()", "hashlib.sha256(json.dumps(self.model).encode()).hexdigest()"),
        ("a shard lacks its first item", "harvest/test_harvest.py::is_a_loop_of_forward_passes",
         "start = shard * self.items_per_shard\n", "start = shard * self.items_per_shard + (shard > 0)\n"),
    ],
    "shards/records.py": [
        ("a shard with other bytes is accepted", "harvest/test_interrupted.py::a_shard_that_is_written_twice_must_have_the_same_bytes",
         "    if known != sha256:\n", "    if known == sha256 and not sha256:\n"),
    ],
    "studies/pairs.py": [
        ("pairs of different lengths run together", "studies/test_studies.py::bad_pairs_are_named_before_anything_runs",
         "if len(clean) != len(corrupted):", "if len(clean) > len(corrupted):"),
        ("a wrong answer is the right one", "studies/test_studies.py::a_table_equals_a_loop_of_sweeps",
         "return Pair(clean, corrupted, answer, wrong)", "return Pair(clean, corrupted, answer, answer if wrong else wrong)"),
    ],
    "studies/table.py": [
        ("positions from the end are those from the start", "studies/test_studies.py::pairs_of_different_lengths_are_aligned_by_name",
         "frame[\"position\"] = frame[ALIGN[align]]", "frame[\"position\"] = frame[ALIGN[\"start\"]]"),
        ("pairs are the first axis of a grid", "studies/test_studies.py::means_over_pairs_with_named_axes",
         ".view(shape).movedim(0, -1)", ".view(*shape[1:], shape[0])"),
    ],
    "results/bootstrap.py": [
        ("an interval is that of another level", "results/test_result.py::intervals_of_skewed_numbers_reach_further_on_the_side_of_the_tail",
         "[(1 - level) / 2, (1 + level) / 2]", "[1 - level, level]"),
        ("an interval is too narrow for few prompts", "results/test_result.py::intervals_of_few_prompts_are_wide_enough",
         "reach = _students_t(level, n_prompts - 1) / math.sqrt(n_prompts)", "reach = _students_t(level, n_prompts - 1) / n_prompts"),
        ("the interval of a share leaves zero to one", "analysis/test_probes.py::intervals_of_accuracies_are_between_0_and_1_and_never_a_point",
         "return (centre - reach).clamp(0, 1).float(), (centre + reach).clamp(0, 1).float()", "return (centre - reach - 0.1).float(), (centre + reach + 0.1).float()"),
    ],
    "results/scores.py": [
        ("a label is given twice", "results/test_result.py::unknown_and_ambiguous_labels",
         "            if len(set(labels)) < len(labels):\n", "            if len(set(labels)) > len(labels):\n"),
        ("labels of a selection stay in their old order", "results/test_result.py::select",
         "axes[name] = [self.axes[name][i] for i in index]", "axes[name] = [self.axes[name][i] for i in sorted(index)]"),
    ],
    "viz/scales.py": [
        ("a scale is not centred", "viz/test_plots.py::colours_cover_the_sides_that_have_values",
         "return Scale(DIVERGING, middle - reach, middle, middle + reach)", "return Scale(DIVERGING, low, middle, high)"),
        ("a limit of colours that is negative is accepted", "viz/test_figure.py::what_cannot_be_drawn_is_refused",
         "if limit is not None and not 0 <= limit < math.inf:", "if limit is not None and not limit < math.inf:"),
    ],
    "viz/attention_data.py": [
        ("a missing value is the largest code", "viz/test_attention.py::small_patterns_come_back",
         "(2**bits - 2), bits,", "(2**bits - 1), bits,"),
        ("the keys that are kept are the first", "viz/test_attention.py::of_too_many_values_the_largest_of_each_query_are_kept",
         "least = size.topk(kept, -1).values[:, -1:]", "least = size[:, kept - 1 : kept]"),
    ],
    "reports/sweep.py": [
        ("the share of a cell starts at zero in a clean run", "cli/test_commands.py::patch_shows_shares_or_nats",
         "start = 0.0 if self.result.base == \"corrupted\" else 1.0", "start = 0.0"),
    ],
    "reports/circuit.py": [
        ("answers that are behind do not warn", "reports/test_circuit.py::answers_that_the_model_does_not_give_are_warned_of",
         "    if not ahead[\"clean\"] > 0:\n", "    if ahead[\"clean\"] > 0 and not ahead[\"clean\"]:\n"),
    ],
    "parallel/split.py": [
        ("a model that is split can be split again", "parallel/test_one_process.py::a_model_is_split_once",
         "if any(isinstance(module, SplitModule) for module in model.modules()):", "if all(isinstance(module, SplitModule) for module in model.modules()):"),
    ],
    "parallel/attention.py": [
        ("the output bias of split attention is dropped", "parallel/test_one_process.py::values_edits_and_gradients_are_those_of_the_whole_model",
         "        return out if self.b_O is None else out + self.b_O", "        return out"),
    ],
    "parallel/mlp.py": [
        ("an edit of split neurons is ignored", "parallel/test_one_process.py::values_edits_and_gradients_are_those_of_the_whole_model",
         "post = gate * linear if is_shared else multiply_into(gate, linear)\n            partial = F.linear(self.hook_post(post), self.W_out.T)",
         "post = gate * linear if is_shared else multiply_into(gate, linear)\n            self.hook_post(post)\n            partial = F.linear(post, self.W_out.T)"),
    ],
    "hub/config_checks.py": [
        ("a config with a layer too many loads", "hub/test_config_checks.py::more_layers_than_the_file_has",
         "if n_layers and not _holds(rows, n_layers - 1, tensors, module.PREFIX):", "if n_layers and not _holds(rows, 0, tensors, module.PREFIX):"),
        ("a size of zero is accepted", "hub/test_config_checks.py::values_that_no_model_has",
         "not least <= value <= most:", "not 0 <= value <= most:"),
    ],
    "hub/names.py": [
        ("a checkpoint is that of the step before", "hub/test_names.py::training_run",
         "        value = steps[index]\n", "        value = steps[index - 1]\n"),
        ("a folder without a config hides a short name", "hub/test_names.py::a_short_name_that_is_a_directory",
         "or (folder / \"config.json\").is_file())", "or folder.is_dir())"),
    ],
    "hub/export.py": [
        ("a folded model is exported", "families/test_decoders.py::gpt2",
         "    if processed := model.cfg.processed:\n", "    if (processed := model.cfg.processed) and not processed:\n"),
        ("an export that fails leaves its files", "hub/test_export.py::nothing_is_left_of_what_failed",
         "        shutil.rmtree(unfinished, ignore_errors=True)\n        with", "        with"),
    ],
    "hub/tl_weights.py": [
        ("the heads of an output weight are transposed", "hub/test_tl_checkpoint.py::a_mingpt",
         "return weight.T.unflatten(0, (n_heads, -1))", "return weight.unflatten(0, (n_heads, -1))"),
    ],
    "cli/output.py": [
        ("the number of a position is its label", "cli/test_commands.py::patch_a_pair",
         "row = {\"position\": number, \"token\": token} | row | {\"position\": number}", "row = {\"position\": number, \"token\": token} | row"),
    ],
    "compat/train.py": [
        ("the warm-up starts at the whole rate", "compat/test_train.py::steps_are_those_of_torch",
         "min(1.0, step / config.warmup_steps)", "min(1.0, (step + 1) / config.warmup_steps)"),
        ("the gradients of a step are those of all before", "compat/test_train.py::it_gets_better",
         "    optimizer.zero_grad()\n    loss = model", "    loss = model"),
        ("an epoch has a step too many", "compat/test_train.py::checkpoints",
         "            if i == config.max_steps:\n", "            if config.max_steps is not None and i > config.max_steps:\n"),
    ],
    "compat/evals.py": [
        ("the mean loss is that of the last batch", "compat/test_evals.py::the_mean_over_so_many_batches",
         "return sum(losses) / len(losses)\n\n\ndef evaluate(", "return losses[-1]\n\n\ndef evaluate("),
    ],
    "compat/tensors.py": [
        ("a reversed sum is that of the reversed tensor", "compat/test_utilities.py::running_sums_from_either_end",
         "tensor.flip(dim).cumsum(dim).flip(dim) if reverse", "tensor.flip(dim).cumsum(dim) if reverse"),
    ],
    "compat/ioi.py": [
        ("a sentence has the same name twice", "compat/test_evals.py::sentences",
         'template.replace("[A]", receiver).replace("[B]", giver)', 'template.replace("[A]", receiver).replace("[B]", receiver)'),
    ],
    "demo/experiment.py": [
        ("the giver of the corrupted prompt is that of the clean one", "demo/test_experiment.py::demo_writes_the_report",
         "_prompt(receiver, giver, giver), _prompt(receiver, giver, receiver)", "_prompt(receiver, giver, giver), _prompt(receiver, giver, giver)"),
    ],
    "saved.py": [
        ("a folder of a model is that of a harvest", "test_saved.py::other_folders_are_refused",
         "    if (folder / MODEL).exists():\n", "    if (folder / MODEL).is_dir():\n"),
    ],
    "factored_matrix.py": [
        ("a transpose keeps the order of its factors", "test_factored_matrix.py::TestProducts::test_with_a_matrix_or_a_stack_of_them",
         "return FactoredMatrix(self.B.mT, self.A.mT)", "return FactoredMatrix(self.A, self.B)"),
        ("a known decomposition survives a change of a factor", "test_factored_matrix.py::TestKeptSVD::test_an_edit_of_a_factor_is_seen",
         "self._known_svd[0] != _versions(*self.pair, *self._known_svd[1]):", "not self._known_svd:"),
        ("the eigenvalues of a product are those of its transposed factors", "test_factored_matrix.py::TestDecompositions::test_eigenvalues",
         "return torch.linalg.eigvals(self.BA)", "return torch.linalg.eigvals(self.B @ self.B.mT)"),
    ],
})
