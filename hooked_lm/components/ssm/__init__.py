"""Mixers with a state: Mamba, Mamba-2, RG-LRU, with their scan and convolution."""
