"""Config defaults that change when the package is imported as `transformer_lens`."""

fused_attention = "auto"  # "never" after an import as `transformer_lens`
