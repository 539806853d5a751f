"""Config fields of encoder-decoders that affect generation only."""

# generation defaults, which old checkpoints keep in the model's config
GENERATION = (
    *("early_stopping", "*_penalty", "max_length", "min_length", "num_beams", "num_beam_groups", "do_sample"),
    *("*no_repeat_ngram_size", "bad_words_ids", "prefix", "force_bos_token_to_be_generated", "output_past"),
)
