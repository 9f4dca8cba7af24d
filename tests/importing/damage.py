"""Damaged folders, and the check that an import refuses them in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.errors import UserError

Damage = Callable[[Path], Any]


def changed(file: str, name: str, value: Any) -> Damage:
    """Returns a function that sets an option in a JSON file of a folder."""

    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(values | {name: value}))

    return change


def check_refused(read_folder: Callable[[Path], Any], intact: Path, damage: Damage, message: str, folder: Path) -> None:
    """Copies an intact folder to `folder`, damages it, and checks that reading fails with this part of a message."""
    shutil.copytree(intact, folder)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        read_folder(folder)
    assert "\n" not in str(raised.value)
