"""Configs that `train` rejects before any work starts."""

from pathlib import Path

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training import loop
from branchnorm_jax.workdir import Workdir


def test_unresolved_remat_is_rejected(tmp_path: Path) -> None:
    """The command line resolves `auto`. A direct call of `train` must not silently choose something else."""
    with pytest.raises(UserError, match=r"model\.remat=auto"):
        loop.train(Config(model=ModelConfig(remat="auto")), Workdir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
