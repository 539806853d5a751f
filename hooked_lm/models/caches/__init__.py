"""The activation caches of each kind of model, and the decomposition of the residual stream."""
