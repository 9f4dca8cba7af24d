"""Evaluation of translations: BLEU, chrF, TER, COMET, significance tests."""
