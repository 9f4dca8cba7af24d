"""The config of an earlier run, read from its workdir.

main.py uses it when there is no --config. These two commands are equivalent:

    python main.py --mode=evaluate --workdir=runs/x
    python main.py --mode=evaluate --workdir=runs/x --config=configs/saved.py:runs/x/config.json
"""

import dataclasses
from pathlib import Path

import ml_collections

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config stored in the JSON file `arg`."""
    if not arg:
        raise UserError("configs/saved.py needs a file, such as configs/saved.py:runs/x/config.json")
    return ml_collections.ConfigDict(dataclasses.asdict(configs.load(Path(arg)))).lock()
