"""Reading activations and weights: lenses, direct logit attribution, head scores, and weights in terms of tokens."""
