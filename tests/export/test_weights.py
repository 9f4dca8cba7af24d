"""The file of the weights."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from branchnorm_jax.export import weights
from tests.conftest import largest_file


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_a_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        weights.save({"a": np.arange(6.0).reshape(2, 3).T}, tmp_path)
    finally:
        os.umask(before)
    path = tmp_path / "model.safetensors"
    assert path.stat().st_mode & 0o777 == mode
    np.testing.assert_array_equal(load_file(path)["a"], np.arange(6.0).reshape(2, 3).T)


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(OSError, match=r"model\.safetensors: .*File too large"):
        weights.save({"a": np.zeros(1000)}, tmp_path)
