"""Train on the built-in corpus, evaluate, show: `make quickstart` calls it as `quickstart.py <workdir> [options...]`.

The options go to training as they are, for example `--config.data.target_lang=fr`. A second call with the same workdir
resumes, so it is quick. A failing step ends this script with that step's exit code.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 5


def run_main(*options: str) -> None:
    """Runs main.py with this interpreter; leaves with its exit code if that is not 0 (128 + n after signal n)."""
    command = [sys.executable, str(ROOT / "main.py"), *options]
    process = subprocess.Popen(command)
    # main.py saves before it stops, and only it knows when that is done. Ctrl-C reaches both processes by itself.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        code = 128 - code
    if code:
        print(f"quickstart: stopped, exit code {code} of: {shlex.join(command)}", file=sys.stderr)
        sys.exit(code)


def held_out(workdir: Path) -> list[tuple[str, str, str]]:
    """(source, reference, hypothesis) of a few test sentences, spread evenly over the test set."""
    texts = [
        (workdir / "evaluation" / f"test.{kind}").read_text(encoding="utf-8").split("\n")[:-1]
        for kind in ("source", "reference", "hypothesis")
    ]
    triples = list(zip(*texts, strict=True))
    return [triples[i * len(triples) // SHOWN] for i in range(SHOWN)]


def main() -> None:
    """Trains and evaluates, then prints translations, the command for one's own text, and the score."""
    workdir, *options = sys.argv[1:]
    started = time.monotonic()
    run_main(f"--config={ROOT / 'configs' / 'numerals.py'}", f"--workdir={workdir}", *options)
    run_main("--mode=evaluate", f"--workdir={workdir}")
    seconds = time.monotonic() - started

    print(f"\n{SHOWN} sentences that training never saw:")
    shown = held_out(Path(workdir))
    for source, reference, hypothesis in shown:
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {hypothesis}")
    translate = [os.path.relpath(sys.executable), os.path.relpath(ROOT / "main.py"), "--mode=translate"]
    print("\nTranslate a line of your own:")
    print(f"  echo {shlex.quote(shown[0][0])} | {shlex.join([*translate, f'--workdir={workdir}'])}\n")
    bleu = json.loads((Path(workdir) / "results.json").read_text(encoding="utf-8"))["test"]["bleu"]
    print(bleu["signature"])
    print(f"quickstart: BLEU {bleu['score']:.1f} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
