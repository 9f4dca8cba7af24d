"""The file of the weights."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from branchnorm_jax.export import weights


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
