"""Which methods compute the same function, so that the quick tests run each function once."""

import dataclasses
from typing import Any

import pytest

from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.recipe import ONE, Recipe


def algebra(method: str) -> Recipe:
    """What of a recipe matters after initialisation."""
    recipe = METHODS[method]
    return dataclasses.replace(
        recipe,
        equation="",
        citation="",
        note="",
        init="",
        gain={},
        recommended={},
        profiled=False,
        skip=recipe.skip if not recipe.skip.learned else dataclasses.replace(recipe.skip, start=ONE),
        branch=recipe.branch if not recipe.branch.learned else dataclasses.replace(recipe.branch, start=ONE),
    )


def every_method() -> list[Any]:
    """Parameters of a test: all methods. Slow are those that differ from an earlier one in initial values alone."""
    first = {algebra(method): method for method in reversed(METHODS)}
    chosen = [method for method in METHODS if first[algebra(method)] == method]
    return [method if method in chosen else pytest.param(method, marks=pytest.mark.slow) for method in METHODS]
