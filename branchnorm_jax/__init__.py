"""Train, inspect and use encoder-decoder Transformers of any depth with BranchNorm and its rivals."""

__version__ = "0.1.0"
