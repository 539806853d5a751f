"""The parts of a transformer that the field has words for, one mechanism per file. Each part is built from its nested `Config`.

The names of axes, here and in all modules:

batch      the prompts of a run
pos        the positions of a prompt (query_pos and key_pos where attention has both)
head       the query heads of a layer
kv_head    the key/value heads, each shared by a group of query heads
d_head     the width of a head
d_model    the width of the residual stream
d_mlp      the width inside an MLP: its neurons
d_vocab    the vocabulary
d_embed    the width of an embedding that is narrower than the stream; d_out the width of an MLM head's output
d_narrow   the width of the stream inside of a block that narrows it
offset     the positions that a convolution reads around its own
class      the classes of a classifier head
d_inner    the channels inside a state-space mixer, cut into ssm_heads of d_ssm_head where it has heads
d_state    the size of the state of a channel; the heads of a group share the B and C (or k and q) that write and read it
expert     the MLPs of a mixture; each token goes to top_k of them
routed     the tokens that were sent to an expert
"""
