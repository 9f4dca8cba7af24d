"""Compares the time that the quickstart takes to reach a BLEU of 95 with that of another checkout.

    python -m benchmarks.quickstart --other=<checkout of another commit>

Both checkouts train with their own configs/numerals.py, in turn, in the environment of this interpreter. They validate
every 50 updates on 100 sentences, and are stopped at the first validation with a BLEU of at least 95. The time includes
starting, preparing the corpus, and compiling.
"""

import argparse
import collections
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import save

GOAL = 95.0
VALIDATED = re.compile(r"step (\d+): validation .*\bbleu ([\d.]+)")


def reach(checkout: Path) -> dict[str, float]:
    """Trains until a validation has a BLEU of `GOAL`.

    Returns:
      The seconds since the start, the updates and the BLEU at that validation.

    Raises:
      RuntimeError: if the training ends before.
    """
    with tempfile.TemporaryDirectory() as workdir:
        command = [
            sys.executable,
            "main.py",
            "--config=configs/numerals.py",
            f"--workdir={workdir}/run",
            "--config.train.eval_every=50",
            "--config.train.eval_bleu_sentences=100",
        ]
        begin, output = time.monotonic(), collections.deque[str](maxlen=5)
        with subprocess.Popen(
            command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    output.append(line)
                    if (found := VALIDATED.search(line)) and float(found[2]) >= GOAL:
                        seconds = time.monotonic() - begin
                        return {"seconds": seconds, "updates": int(found[1]), "bleu": float(found[2])}
            finally:
                process.terminate()
    raise RuntimeError(f"{checkout}: the training ended without a BLEU of {GOAL}:\n{''.join(output)}")


def main() -> None:
    """Measures both checkouts in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    here, rounds = Path(__file__).resolve().parent.parent, []
    for _ in range(arguments.rounds):
        rounds.append({"ours": reach(here), "other": reach(arguments.other.resolve())})
        print(rounds[-1], flush=True)
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=arguments.other, text=True).strip()
    ratio = statistics.median(each["ours"]["seconds"] / each["other"]["seconds"] for each in rounds)
    save("quickstart", {"ours_over_other": ratio, "other_revision": revision, "rounds": rounds})


if __name__ == "__main__":
    main()
