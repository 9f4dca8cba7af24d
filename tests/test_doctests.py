"""Runs the examples in the docstrings of the modules that have some."""

import doctest
import importlib

import pytest

MODULES = (
    "branchnorm_jax.analysis.collectives",
    "branchnorm_jax.analysis.program",
    "branchnorm_jax.analysis.topologies",
    "branchnorm_jax.codes",
    "branchnorm_jax.model.coefficients",
    "branchnorm_jax.model.depth_rules",
    "branchnorm_jax.model.growth",
    "branchnorm_jax.model.norms",
    "branchnorm_jax.model.segments",
    "branchnorm_jax.model.stack",
    "branchnorm_jax.training.schedules",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
