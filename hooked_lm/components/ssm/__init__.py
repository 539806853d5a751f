"""State-space mixers: Mamba, Mamba-2, RG-LRU, Gated DeltaNet and short convolutions, with their scan and convolution."""
