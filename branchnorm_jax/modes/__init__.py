"""What each `--mode` of main.py does: rooms put together, no mathematics. No room imports this folder."""

from branchnorm_jax.modes.lines import score, translate
from branchnorm_jax.modes.runs import analyze, methods, plan, preflight, sweep, train
from branchnorm_jax.modes.serve import serve
from branchnorm_jax.modes.use import average, compare, evaluate, export

__all__ = [
    "analyze",
    "average",
    "compare",
    "evaluate",
    "export",
    "methods",
    "plan",
    "preflight",
    "score",
    "serve",
    "sweep",
    "train",
    "translate",
]
