"""Finds the methods that compute the same function, so that the quick tests run each function once."""

import dataclasses
from typing import Any

import pytest

from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.recipe import ONE, Recipe


def algebra(method: str) -> Recipe:
    """Returns the recipe without the fields that do not affect the function that the method computes."""
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
    """Returns all methods as test parameters.

    Methods that differ from an earlier method only in their initial values are marked slow.
    """
    first = {algebra(method): method for method in reversed(METHODS)}
    distinct = [method for method in METHODS if first[algebra(method)] == method]
    return [method if method in distinct else pytest.param(method, marks=pytest.mark.slow) for method in METHODS]
