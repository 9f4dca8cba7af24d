"""What each `--mode` of main.py does: rooms put together, no mathematics. Only main.py imports this folder."""

from branchnorm_jax.modes.runs import analyze, methods, plan, preflight, sweep, train
from branchnorm_jax.modes.use import compare, evaluate, export, score, translate

__all__ = [
    "analyze",
    "compare",
    "evaluate",
    "export",
    "methods",
    "plan",
    "preflight",
    "score",
    "sweep",
    "train",
    "translate",
]
