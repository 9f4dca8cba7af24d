"""Trained models for other engines: folded into a plain Transformer, written in their formats, and compared."""
