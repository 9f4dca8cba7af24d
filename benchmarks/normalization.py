"""Measures how many sentences stay as they are under each rule of normalisation.

    python -m benchmarks.normalization <file> ...

A file has one sentence per line and may be compressed with gzip. Its language is the last part of its name: test.de.gz.
"""

import argparse
import gzip
from pathlib import Path

from benchmarks.measure import save
from branchnorm_jax.data.normalization import normalizer
from branchnorm_jax.options import NORMALIZATIONS


def shares(path: Path) -> dict[str, float]:
    """Returns the share of the lines of a file that each rule leaves unchanged."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    lines = text.removesuffix("\n").split("\n")
    return {
        rule: sum(normalizer(rule).normalize(line) == line for line in lines) / len(lines) for rule in NORMALIZATIONS
    }


def main() -> None:
    """Measures the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    files = parser.parse_args().files
    save("normalization", {path.name.removesuffix(".gz").split(".")[-1]: shares(path) for path in files})


if __name__ == "__main__":
    main()
