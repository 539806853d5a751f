"""What new configs say where nothing is given, and users of different interfaces expect different things."""

fused_attention = "auto"  # "never" once the package was imported under the name `transformer_lens`
