"""Generation: sampling, and the loops of decoders and of encoder-decoders."""
