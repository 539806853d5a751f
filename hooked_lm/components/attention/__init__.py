"""Attention: the layers, the kernel they share, and position biases."""
