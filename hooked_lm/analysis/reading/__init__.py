"""Reading: lenses, direct logit attribution, scores of heads, and what weights do in terms of tokens."""
