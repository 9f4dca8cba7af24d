"""What `train` refuses before any work starts."""

from pathlib import Path

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training import loop
from branchnorm_jax.workdir import Workdir


def test_an_unresolved_choice_of_remat_is_refused(tmp_path: Path) -> None:
    """The front door resolves auto. Who calls `train` directly must not get something else without a word."""
    with pytest.raises(UserError, match=r"model\.remat=auto"):
        loop.train(Config(model=ModelConfig(remat="auto")), Workdir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
