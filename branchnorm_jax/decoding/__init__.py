"""Translation of text: beam search, sampling, scoring and attention."""
