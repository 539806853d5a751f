"""The parts of a transformer, one mechanism a file. Each part builds from its own nested `Config`.

The words for axes, here and everywhere:

batch      the prompts of a run
pos        the positions of a prompt (query_pos and key_pos where attention has both)
head       the query heads of a layer
kv_head    the key/value heads, each shared by a group of query heads
d_head     the width of a head
d_model    the width of the residual stream
d_mlp      the width inside an MLP: its neurons
d_vocab    the vocabulary
"""
