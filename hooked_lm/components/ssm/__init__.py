"""State-space mixers: Mamba, Mamba-2, RG-LRU and short convolutions, with their scan and convolution."""
