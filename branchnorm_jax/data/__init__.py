"""Data pipeline from text to batches: corpora, SentencePiece, token stores, packing. Uses NumPy, never jax."""
