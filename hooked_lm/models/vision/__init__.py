"""Models that read images: towers, pairs of towers, and decoders with a tower; their inputs, and where images are in them."""
