"""Beam search, and lines in, lines out."""
