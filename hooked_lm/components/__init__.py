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
d_embed    the width of an embedding that is narrower than the stream; d_out that of what a head unembeds
class      what a head of an encoder tells apart
d_inner    the channels inside a state-space mixer, cut into ssm_heads of d_ssm_head where it has heads
d_state    the numbers that such a channel keeps; the heads of a group have what writes and reads them in common
expert     the MLPs of a mixture; each token goes to top_k of them
routed     the tokens that were sent to an expert
"""
