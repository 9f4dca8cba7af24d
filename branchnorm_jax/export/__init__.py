"""Export of trained models to other engines: folding to a plain Transformer, file formats and comparison."""
