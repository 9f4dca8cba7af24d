"""The walls of the house: who may import whom, what a file looks like, what must not be in it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "branchnorm_jax"

# room -> the rooms it may use. All may also use those of FOR_ALL.
MAY_IMPORT = {
    "errors": set(),
    "options": set(),
    "config": set(),
    "workdir": set(),
    "model": set(),
    "data": set(),
    "parallel": set(),
    "export": {"model"},
    "decoding": {"model", "data"},
    "serving": {"decoding", "data", "model"},
    "evaluation": {"decoding", "model", "data", "parallel"},
    "training": {"evaluation", "decoding", "model", "data", "parallel"},
    "analysis": {"training", "evaluation", "decoding", "model", "data", "parallel"},
    # What main.py's modes do: it may use every room, and no room may use it.
    "modes": {"analysis", "training", "evaluation", "decoding", "model", "data", "parallel", "export", "serving"},
}
FOR_ALL = {"options", "config", "errors", "workdir"}

# room -> packages of others that it must not use anywhere.
MUST_NOT_IMPORT = {
    "data": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "model": {"os", "io", "pathlib", "shutil", "time", "datetime"},
}

# Only inside a function: slow to import, or not installed everywhere.
HEAVY = {
    *("tensorflow", "tensorflow_datasets", "matplotlib", "ctranslate2", "torch", "transformers", "tensorboardX"),
    "uvicorn",
}

MOST_LINES = 400
LISTS = {"options.py"}  # one entry after the other, read by looking up

PACKAGE_FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
SCRIPTS = [path for name in ("configs", "launch", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
SOURCES = [*sorted(ROOT.glob("*.py")), *PACKAGE_FILES, *SCRIPTS]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """Folder of the package, or the module's name for the files that lie directly in it."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return parts[0]


def imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[str, bool]]:
    """(dotted name, inside a function) of everything that a module of `package` imports, `from a import b` as "a.b"."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            yield from ((".".join([*prefix, alias.name]), inside) for alias in node.names)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(tree, False)


def faults(source: str, path: Path) -> list[str]:
    """What the file at `path` with this text imports against the rules."""
    room = room_of(path)
    if room == "__init__":
        allowed = set()
    elif room in MAY_IMPORT:
        allowed = MAY_IMPORT[room] | FOR_ALL | {room}
    else:
        return [f"{room} is no room of MAY_IMPORT"]
    found = []
    for name, inside in imports(ast.parse(source), list(path.relative_to(ROOT).parent.parts)):
        top, *rest = name.split(".")
        if top == PACKAGE and rest and rest[0] not in allowed and rest[0] != "__version__":
            found.append(f"{room} must not import {name}")
        if top == "main":
            found.append("nothing imports main")
        if top in MUST_NOT_IMPORT.get(room, set()):
            found.append(f"{room} must not import {top}")
        if top in HEAVY and not inside:
            found.append(f"{top} is imported outside of a function")
    return found


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_imports(path):
    assert faults(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    ("file", "source", "broken"),
    [
        ("model/x.py", "from branchnorm_jax.training import loop", True),
        ("model/x.py", "from branchnorm_jax import data", True),
        ("model/x.py", "def f():\n  from ..training.loop import train", True),
        ("model/x.py", "import time", True),
        ("model/x.py", "from . import blocks\nfrom branchnorm_jax.options import Config", False),
        ("data/x.py", "def f():\n  import jax.numpy as jnp", True),
        ("decoding/x.py", "from branchnorm_jax.data.tokenizer import load", False),
        ("decoding/x.py", "import branchnorm_jax.parallel.mesh", True),
        ("training/x.py", "from branchnorm_jax.analysis import plan", True),
        ("analysis/x.py", "from branchnorm_jax.training import loop", False),
        ("analysis/x.py", "import matplotlib.pyplot as plt", True),
        ("analysis/x.py", "try:\n  import torch\nexcept ImportError:\n  pass", True),
        ("analysis/x.py", "def f():\n  import matplotlib.pyplot as plt", False),
        ("training/x.py", "from main import run", True),
        ("config.py", "from branchnorm_jax.model import methods", True),
        ("kitchen/x.py", "", True),
    ],
)
def test_the_rule_itself(file, source, broken):
    assert bool(faults(source, ROOT / PACKAGE / file)) == broken


def test_every_room_is_a_package():
    rooms = {path.parent for path in PACKAGE_FILES}
    assert {name_of(room) for room in rooms if not (room / "__init__.py").exists()} == set()


def test_data_loads_without_jax_and_tensorflow():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE_FILES
        if room_of(path) == "data"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *modules]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(modules) <= set(loaded)
    assert (MUST_NOT_IMPORT["data"] | HEAVY) & set(loaded) == set()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_says_what_it_is_and_is_read_in_one_sitting(path):
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "no docstring"
    assert source.count("\n") < MOST_LINES or path.name in LISTS, "two jobs?"


def test_no_path_of_one_machine():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so which files belong to the project is unknown")
    pattern = re.compile(rb"(?<![\w./-])/(?:work|root)\b")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in files
    assert [name_of(path) for path in files if pattern.search(path.read_bytes())] == []
