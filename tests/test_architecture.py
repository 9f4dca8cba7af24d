"""Checks the architecture: allowed imports, module docstrings, function sizes, forbidden paths.

A component is a subpackage of the package, or a module directly in the package.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "branchnorm_jax"

# component -> components that it may import. Every component may also import those in FOR_ALL.
MAY_IMPORT = {
    "errors": set(),
    "options": set(),
    "tokens": set(),
    "codes": set(),
    "axes": set(),
    "checks": set(),
    "config": {"checks", "files"},
    "files": set(),
    "compiled": {"files"},
    "bucket": {"files"},
    "workdir": {"bucket", "config", "files"},
    "model": {"axes"},
    "data": {"bucket", "files"},
    "parallel": {"axes"},
    "export": {"model"},
    "importing": {"data", "export"},
    "decoding": {"model", "data"},
    "serving": {"decoding", "data", "model"},
    "evaluation": {"data", "files"},
    "training": {"evaluation", "decoding", "model", "data", "parallel", "axes", "config", "files", "workdir"},
    "analysis": {"axes", "training", "evaluation", "model", "data", "parallel", "config", "workdir"},
    # Only cli.py may import the modes.
    "modes": {
        *(
            "analysis",
            "training",
            "evaluation",
            "decoding",
            "model",
            "data",
            "parallel",
            "export",
            "importing",
            "serving",
        ),
        *("bucket", "config", "files", "workdir"),
    },
    "cli": {"modes", "model", "parallel", "compiled", "config", "workdir"},
}
FOR_ALL = {"options", "errors", "tokens", "codes"}

# component -> external packages that it must not import anywhere.
MUST_NOT_IMPORT = {
    "data": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "model": {"os", "io", "pathlib", "shutil", "time", "datetime"},
}

# Imported only inside functions, because they are slow to import or not installed everywhere. (Starlette and uvicorn
# are imported by `serving` alone, which is itself imported inside functions.)
HEAVY = {"tensorflow", "tensorflow_datasets", "matplotlib", "ctranslate2", "torch", "transformers", "tensorboardX"}

# Limits of a function. Blank lines, comments and the signature count as lines; the docstring does not. self and cls do
# not count as parameters. A nested function counts by itself and as part of the enclosing function.
MOST_LINES, MOST_PARAMETERS = 60, 8

PACKAGE_FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
SCRIPTS = [
    path for name in ("configs", "launch", "benchmarks", "experiments") for path in sorted((ROOT / name).rglob("*.py"))
]
SOURCES = [*sorted(ROOT.glob("*.py")), *PACKAGE_FILES, *SCRIPTS]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def component_of(path: Path) -> str:
    """Returns the subpackage of a file, or the name of a module directly in the package."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return parts[0]


def imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[str, bool]]:
    """Yields (dotted name, inside a function) of every import of a module of `package`; `from a import b` as "a.b"."""

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
    """Returns a message for each forbidden import of a file at `path` with this text."""
    component = component_of(path)
    if component == "__init__":
        allowed = set()
    elif component in MAY_IMPORT:
        allowed = MAY_IMPORT[component] | FOR_ALL | {component}
    else:
        return [f"{component} is missing from MAY_IMPORT"]
    messages = []
    for name, inside in imports(ast.parse(source), list(path.relative_to(ROOT).parent.parts)):
        top, *rest = name.split(".")
        if top == PACKAGE and rest and rest[0] not in allowed and rest[0] != "__version__":
            messages.append(f"{component} must not import {name}")
        if top == "main":
            messages.append("nothing imports main")
        if top in MUST_NOT_IMPORT.get(component, set()):
            messages.append(f"{component} must not import {top}")
        if top in HEAVY and not inside:
            messages.append(f"{top} is imported outside of a function")
    return messages


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_imports_follow_the_architecture(path):
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
        ("modes/x.py", "from branchnorm_jax.cli import main", True),
        ("data/x.py", "from branchnorm_jax.workdir import Workdir", True),
        ("data/x.py", "from branchnorm_jax.files import lock", False),
        ("kitchen/x.py", "", True),
    ],
)
def test_import_check_detects_violations(file, source, broken):
    assert bool(faults(source, ROOT / PACKAGE / file)) == broken


def test_every_folder_is_a_package():
    components = {path.parent for path in PACKAGE_FILES}
    assert {name_of(component) for component in components if not (component / "__init__.py").exists()} == set()


def test_data_loads_without_jax_and_tensorflow():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE_FILES
        if component_of(path) == "data"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *modules]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(modules) <= set(loaded)
    assert (MUST_NOT_IMPORT["data"] | HEAVY) & set(loaded) == set()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "no docstring"


def size_of(node: ast.stmt) -> int:
    """Returns the number of source lines of a node."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def too_large(source: str) -> Iterator[str]:
    """Yields the names of the functions that exceed a limit; methods as Class.method."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = size_of(child)
                if ast.get_docstring(child):
                    lines -= size_of(child.body[0])
                a = child.args
                names = [argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                if lines > MOST_LINES or len(set(names) - {"self", "cls"}) > MOST_PARAMETERS:
                    yield name
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            yield from walk(child, f"{name}." if named else prefix)

    return walk(ast.parse(source), "")


def test_functions_respect_the_limits():
    assert [(name_of(path), name) for path in PACKAGE_FILES for name in too_large(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("source", "large"),
    [
        ("def f():\n" + "  pass\n" * 59, []),
        ("def f():\n" + "  pass\n" * 60, ["f"]),
        ('def f():\n  """One.\n\n  More."""\n' + "  pass\n" * 59, []),
        ("class C:\n  def f(self, a, b, c, d, e, f, g, h): pass", []),
        ("class C:\n  def f(self, a, b, c, d, e, f, g, *, h, i): pass", ["C.f"]),
    ],
)
def test_size_check_applies_the_limits(source, large):
    assert list(too_large(source)) == large


def test_every_allowed_import_is_used():
    used: dict[str, set[str]] = {component: set() for component in MAY_IMPORT}
    for path in PACKAGE_FILES:
        names = imports(ast.parse(path.read_text(encoding="utf-8")), list(path.relative_to(ROOT).parent.parts))
        tops = {name.split(".")[1] for name, _ in names if name.startswith(f"{PACKAGE}.")}
        used.setdefault(component_of(path), set()).update(tops)
    assert {
        component: allowed - used[component] for component, allowed in MAY_IMPORT.items() if allowed - used[component]
    } == {}


def test_no_machine_specific_paths():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so which files belong to the project is unknown")
    pattern = re.compile(rb"(?<![\w./-])/(?:work|root)\b")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert ROOT / "pyproject.toml" in files
    assert [name_of(path) for path in files if pattern.search(path.read_bytes())] == []
