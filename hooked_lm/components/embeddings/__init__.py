"""Embeddings and unembeddings: of tokens, of positions (learned or rotary), and of what tokens have besides."""
