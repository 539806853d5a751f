"""Code shared by several families, and `HFConfig`, which records the config fields that were read."""
