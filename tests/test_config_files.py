"""Config files that fail, in every way that Python code can: one line and exit code 2."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from branchnorm_jax.cli import main
from tests.conftest import ROOT

FAULTY = {
    "assert False": "AssertionError: no message",
    "raise ValueError('first\\nsecond')": "(ValueError: first second)",
    "raise ValueError": "ValueError",
    "raise TypeError('wide')": "wide",
    "raise MemoryError": "MemoryError",
    "raise OSError('a\\rb\\x1b[2J\\udcff')": "\\x1b[2J\\udcff",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "import sys; sys.exit('bye')": "SystemExit: bye",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "def get_config(arg): return get_config(arg)": "RecursionError",
    "def get_config(arg": "SyntaxError",
    "x = '\0'": "null bytes",
    "get_config = lambda arg: None": "get_config() returns None",
    "get_config = lambda arg: {'model': 1}": "AttributeError: 'dict' object",
}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.py")), ids=lambda path: path.stem)
def test_python_commands_in_the_heads_of_configs_can_be_parsed(path: Path) -> None:
    head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
    for command in re.findall(r'^ +(python -c "[^"]*")$', head, flags=re.MULTILINE):
        ast.parse(shlex.split(command)[2])
    assert "python -c" not in re.sub(r'^ +python -c "[^"]*"$', "", head, flags=re.MULTILINE)


@pytest.mark.parametrize("code", FAULTY)
def test_faulty_config_files(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    assert main(["main.py", "--mode=plan", f"--config={path}:2L-2L", f"--workdir={tmp_path}"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("WARNING")]
    assert len(said) == 1, said
    assert said[0].startswith(f"UserError: --config={path}:2L-2L: this file fails (")
    assert FAULTY[code] in said[0]


def test_names_with_line_breaks_do_not_break_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["main.py", "--mode=translate", f"--workdir={tmp_path}/a\nb\u2028"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"UserError: --workdir={tmp_path}/a\\nb\\u2028: no training run in this folder"
    ]
