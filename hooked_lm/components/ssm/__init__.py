"""State-space mixers: Mamba, Mamba-2 and RG-LRU, with their scan and convolution."""
