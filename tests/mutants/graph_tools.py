"""Faults in what explains and shows attribution graphs: attention scores by pairs of sources, head loadings, files and pages."""

from tests.mutants.mutant import mutants

# fmt: off
GRAPH_TOOLS = mutants({
    "analysis/graphs/qk_maps.py": [
        ("the weight of a norm is left out of queries and keys", "analysis/graphs/test_qk_families.py::gemma2",
         "return x if gain is None else x * gain.detach().to(x)", "return x"),
        ("biases are no sources", "analysis/graphs/test_qk.py::terms_sum_to_the_scores",
         "if step.constant is None or not bool(step.constant.any()):", "if True:"),
        ("queries are rotated as if they were at the first positions", "analysis/graphs/test_qk_families.py::gemma2",
         "return self.positions.apply(cos, 1), self.positions.apply(sin, 1)",
         "n = len(self.positions.indices(cos.shape[1])); return cos[:, :n], sin[:, :n]"),
        ("the latent of keys is not divided by its scale", "analysis/graphs/test_qk_families.py::deepseek_v3",
         "nope = project(times(norm.linear(latent), cfg.kv_factor), W_UK)", "nope = project(times(latent, cfg.kv_factor), W_UK)"),
    ],
    "analysis/graphs/qk_run.py": [
        ("terms are those before a soft cap", "analysis/graphs/test_qk.py::a_cap_is_a_ratio",
         "            terms * ratio,", "            terms,"),
        ("a sum that is not the score passes", "analysis/graphs/test_qk.py::terms_that_do_not_sum",
         "if not difference <= max(TOLERANCE", "if False and not difference <= max(TOLERANCE"),
        ("a bias of positions is no term", "analysis/graphs/test_qk.py::a_bias_of_positions",
         "terms[:, -1, -1] = bias", "terms[:, -1, -1] = 0"),
        ("features beyond the first k are lost", "analysis/graphs/test_qk_features.py::more_features",
         "return found | ({OTHERS: torch.stack(others)[None]} if rest else {})", "return found"),
        ("heads that share keys read those of another group", "analysis/graphs/test_qk_families.py::gemma2",
         "[head // group for head in self.heads]", "[head % value.shape[-2] for head in self.heads]"),
    ],
    "analysis/graphs/qk_features.py": [
        ("the error of an MLP has its features, too", "analysis/graphs/test_qk_features.py::terms_with_features",
         "error = whole - of_features -", "error = whole -"),
    ],
    "analysis/graphs/qk.py": [
        ("what keys have in common stays", "analysis/graphs/test_qk.py::nothing_between_keys",
         "values=self.values - self.values.nanmean(axis, keepdim=True)", "values=self.values"),
    ],
    "analysis/graphs/loadings.py": [
        ("what flows through no head is left out", "analysis/graphs/test_qk_features.py::loadings_sum",
         "direct[position] += float(", "direct[position] += 0 * float("),
        ("changes are not divided by what they were enlarged by", "analysis/graphs/test_qk_features.py::loadings_sum_to_the_edge",
         "moved = (after[site] - live.values[site])[0].float() / times", "moved = (after[site] - live.values[site])[0].float()"),
    ],
    "analysis/graphs/neuronpedia.py": [
        ("an error has the id of a feature", "analysis/graphs/test_neuronpedia_graphs.py::ids_are_different",
         'f"{name}_error" if name in features else name', "name"),
        ("links are written from target to source", "analysis/graphs/test_neuronpedia_graphs.py::comes_back",
         '{"source": ids[source], "target": ids[target],', '{"source": ids[target], "target": ids[source],'),
    ],
    "viz/attribution_graph.py": [
        ("a token can end the script of the page", "viz/test_attribution_graph.py::loads_nothing",
         "data=as_json(data)", "data=__import__('json').dumps(data)"),
        ("a node at a position without a token is drawn", "viz/test_attribution_graph.py::what_is_refused",
         "if not 0 <= node.position < len(tokens):", "if node.position < 0:"),
    ],
    "cli/graph.py": [
        ("the page has other shares than the table", "cli/test_graph.py::text_and_json",
         "small = found.pruned(nodes, edges)", "small = found.pruned(nodes / 2, edges)"),
    ],
})
