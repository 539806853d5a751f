"""Defaults of new configs that differ between the package's own interface and the one under the name `transformer_lens`."""

fused_attention = "auto"  # "never" once the package was imported under the name `transformer_lens`
