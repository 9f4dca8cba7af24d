"""Finds the methods that compute the same function, so that the quick tests run each function once."""

import dataclasses
from collections.abc import Collection
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


STREAMS = ("post_ln", "pre_ln", "dlcl", "residual_dual", "siamese_norm", "mhc", "block_attnres")
"""A method for each way in which the residual stream is carried."""


def every_method(quick: Collection[str] = METHODS) -> list[Any]:
    """Returns all methods as test parameters.

    Methods that are not in `quick`, or differ from an earlier one only in their initial values, are marked slow.
    """
    first = {algebra(method): method for method in reversed(METHODS)}
    distinct = [method for method in METHODS if first[algebra(method)] == method and method in quick]
    return [method if method in distinct else pytest.param(method, marks=pytest.mark.slow) for method in METHODS]
