"""Trains on the built-in corpus, evaluates and shows translations: `quickstart.py <workdir> [options...]`.

`make quickstart` runs this script. The options are passed to training unchanged, for example
`--config.data.target_lang=fr`. A second call with the same workdir resumes and is therefore quick. If a step fails, the
script ends with the exit code of that step.
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
    """Runs main.py with this interpreter. Exits with its exit code if it is not 0 (128 + n after signal n)."""
    command = [sys.executable, str(ROOT / "main.py"), *options]
    process = subprocess.Popen(command)
    # Wait for main.py, which saves before it stops. SIGTERM is forwarded; Ctrl-C reaches both processes anyway.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        code = 128 - code
    if code:
        print(f"quickstart: stopped with exit code {code}: {shlex.join(command)}", file=sys.stderr)
        sys.exit(code)


def held_out(workdir: Path) -> list[tuple[str, str, str]]:
    """Returns (source, reference, hypothesis) of `SHOWN` test sentences, spread evenly over the test set."""
    texts = [
        (workdir / "evaluation" / f"test.{kind}").read_text(encoding="utf-8").split("\n")[:-1]
        for kind in ("source", "reference", "hypothesis")
    ]
    triples = list(zip(*texts, strict=True))
    return [triples[i * len(triples) // SHOWN] for i in range(SHOWN)]


def main() -> None:
    """Trains and evaluates, then prints translations, a command to translate other text, and the score."""
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        print("usage: quickstart.py <workdir> [options of main.py...]", file=sys.stderr)
        sys.exit(2)
    workdir, *options = sys.argv[1:]
    started = time.monotonic()
    run_main(f"--config={ROOT / 'configs' / 'numerals.py'}", f"--workdir={workdir}", *options)
    run_main("--mode=evaluate", f"--workdir={workdir}")
    seconds = time.monotonic() - started

    if not Path(workdir, "evaluation", "test.hypothesis").is_file():
        # The folder is in a bucket, or it has the translations of several language pairs.
        print(f"quickstart: done in {seconds:.0f} s; the scores are above")
        return
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
