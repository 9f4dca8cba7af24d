"""Collects the options, costs and scores of trained models in one file.

    python -m benchmarks.models deep_models runs/a runs/b ...

Run `--mode=evaluate` on each workdir first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.options import Config
from branchnorm_jax.training.logs import read_lines

PATHS = ("data.path", "train.deepen_from", "train.finetune_from")
VALIDATION = ("step", "loss", "nll", "source_gain")


def read(folder: Path) -> dict[str, Any]:
    """Reads the record of one workdir."""
    status = json.loads((folder / "status.json").read_text())
    results = json.loads((folder / "results.json").read_text())
    default = configs.to_flat(Config())
    options = configs.to_flat(configs.load(folder / "config.json"))
    return {
        "workdir": folder.name,
        # Only the name of a folder: it identifies the corpus or the run, while the path is specific to one machine.
        "options": {
            name: Path(value).name if name in PATHS else value
            for name, value in options.items()
            if value != default[name]
        },
        "validation": [
            {name: line[name] for name in VALIDATION} for line in read_lines(folder / "validation.jsonl", VALIDATION)
        ],
        "status": status,
        "scores": {
            name: {key: score[key] for key in ("score", "signature")} for name, score in results["test"].items()
        },
    }


def main() -> None:
    """Reads all workdirs and saves the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the file under benchmarks/results")
    parser.add_argument("workdirs", nargs="+", type=Path)
    args = parser.parse_args()
    save(args.name, {"models": [read(folder) for folder in args.workdirs]})


if __name__ == "__main__":
    main()
