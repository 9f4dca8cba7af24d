"""Settings of the tests with several processes."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def hasty_compiler() -> Iterator[None]:
    """Each process compiles the programs of its mesh, which takes most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
