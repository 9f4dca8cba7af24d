"""Data never runs as code: nothing in the package can unpickle, evaluate or execute what a file contains."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
"""Modules that run code when they read a file."""

CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}

OBJECTS = {
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"),
    *(f"yaml.{kind}Loader" for kind in ("", "Full", "Unsafe", "C", "CFull", "CUnsafe")),
}
"""Functions and classes that make any Python object that a YAML file names."""

NEEDED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
"""Call -> the argument with which it is safe."""

FORBIDDEN = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True), ("shell", True)}


def findings(source: str) -> Iterator[str]:
    """Yields the places of a source text that could run data as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in OBJECTS:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
        unsafe = name in CALLS or not FORBIDDEN.isdisjoint(given.items())
        if name in NEEDED:
            argument, value = NEEDED[name]
            unsafe |= given.get(argument) is not value
        if unsafe:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_code_is_read_from_files() -> None:
    paths = [*(ROOT / "branchnorm_jax").rglob("*.py"), *(ROOT / "configs").rglob("*.py"), ROOT / "main.py"]
    assert len(paths) > 100
    assert {str(path): found for path in paths if (found := [*findings(path.read_text(encoding="utf-8"))])} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import load",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "np.load(path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(text)",
        "yaml.load(text, yaml.Loader)",
        "read = functools.partial(yaml.load, Loader=yaml.UnsafeLoader)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_such_code_is_found(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "model.eval()", "re.compile(text)", "yaml.safe_load(text)"]
)
def test_other_code_is_not(source: str) -> None:
    assert list(findings(source)) == []
