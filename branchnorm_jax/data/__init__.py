"""Text to batches: corpora, SentencePiece, the token store and `batch_at(step)`. NumPy only, never jax."""
