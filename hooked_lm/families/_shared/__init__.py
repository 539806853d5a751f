"""Parts that several families share, and the config that records which fields were read."""
