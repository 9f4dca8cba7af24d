"""Every mode of the command line has a function, and starts without the modules of the others."""

import subprocess
import sys

from branchnorm_jax.cli import MODES
from branchnorm_jax.modes import function_of
from tests.conftest import ROOT


def test_every_mode_has_a_function() -> None:
    functions = {mode: function_of(mode) for mode in MODES if mode != "help"}
    assert all(map(callable, functions.values()))
    assert len({*functions.values()}) == len(functions)


def test_translate_does_not_import_what_only_scores_need() -> None:
    program = "import sys; from branchnorm_jax.modes import function_of; function_of('translate'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert "branchnorm_jax.modes.lines" in done.stdout.split()
    assert not {"sacrebleu", "sacremoses", "branchnorm_jax.modes.serve"} & {*done.stdout.split()}
