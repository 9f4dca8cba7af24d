"""Scores of translations, each with the signature that makes it comparable."""
