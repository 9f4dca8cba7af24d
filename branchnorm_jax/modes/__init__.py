"""Implements each `--mode` of main.py by combining the other subpackages, none of which imports this one."""

from branchnorm_jax.modes.average import average
from branchnorm_jax.modes.clean import clean
from branchnorm_jax.modes.compare import compare
from branchnorm_jax.modes.evaluate import evaluate
from branchnorm_jax.modes.export import export
from branchnorm_jax.modes.importing import import_
from branchnorm_jax.modes.language import generate
from branchnorm_jax.modes.lines import score, translate
from branchnorm_jax.modes.runs import analyze, methods, plan, preflight, sweep, train
from branchnorm_jax.modes.serve import serve

__all__ = [
    "analyze",
    "average",
    "clean",
    "compare",
    "evaluate",
    "export",
    "generate",
    "import_",
    "methods",
    "plan",
    "preflight",
    "score",
    "serve",
    "sweep",
    "train",
    "translate",
]
