"""Implements each `--mode` of main.py by combining the other subpackages, none of which imports this one."""

import importlib
import keyword
from collections.abc import Callable

from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir

MODULES = {
    "generate": "language",
    "import": "importing",
    **dict.fromkeys(("score", "translate"), "lines"),
    **dict.fromkeys(("analyze", "methods", "plan", "preflight", "sweep", "train"), "runs"),
}
"""Mode -> module, if their names differ."""


def function_of(mode: str) -> Callable[[Config, Workdir], None]:
    """Returns the function of a mode. Imports only its module: all of them take as long as a short translation."""
    module = importlib.import_module(f"{__name__}.{MODULES.get(mode, mode)}")
    function: Callable[[Config, Workdir], None] = getattr(module, f"{mode}_" if keyword.iskeyword(mode) else mode)
    return function
