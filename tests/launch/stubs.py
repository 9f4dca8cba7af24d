"""Stand-ins for the commands of a cluster. They record their arguments and answer as a test says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

STUB = """#!{python} -SE
import json, pathlib, re, sys, time
path = pathlib.Path(sys.argv[0])
call = [path.name, *sys.argv[1:]]
file = path.parent / "calls"
earlier = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
with file.open("a") as calls:
    calls.write(json.dumps(call) + "\\n")
for pattern, answers in json.loads((path.parent / "answers").read_text()):
    if re.search(pattern, " ".join(call)):
        turn = sum(bool(re.search(pattern, " ".join(one))) for one in earlier)
        code, output, seconds = answers[min(turn, len(answers) - 1)]
        print(output, file=sys.stderr if code else sys.stdout)
        print("WARNING: this command has a newer version", file=sys.stderr)
        time.sleep(seconds)
        sys.exit(code)
"""

Answer = int | str | tuple[int, float | str]


class Stubs:
    """Puts stand-ins for the commands `names` on PATH, in `folder`."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder / "stubs"
        self.folder.mkdir()
        self.answers: list[tuple[str, list[tuple[int, str, float]]]] = []
        (self.folder / "answers").write_text("[]")
        for name in names:
            path = self.folder / name
            path.write_text(STUB.format(python=sys.executable))
            path.chmod(0o755)

    def answer(self, pattern: str, *answers: Answer) -> None:
        """Sets the answers to calls that match `pattern`, one per call; the last one repeats.

        An answer is an exit code, an output, or an exit code with the output or with the seconds before it.
        """

        def full_answer(answer: Answer) -> tuple[int, str, float]:
            if isinstance(answer, str):
                return 0, answer, 0.0
            code, rest = answer if isinstance(answer, tuple) else (answer, "")
            return (code, rest, 0.0) if isinstance(rest, str) else (code, "", rest)

        full = [full_answer(answer) for answer in answers]
        self.answers.insert(0, (pattern, full))
        (self.folder / "answers").write_text(json.dumps(self.answers))

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JAX_", "TPU_"))}
        return subprocess.Popen(
            ["bash", str(ROOT / command[0]), *command[1:]],
            cwd=self.folder.parent, env=inherited | variables | {"PATH": path},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, **variables)
        out, error = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    @property
    def calls(self) -> list[list[str]]:
        """The calls so far, each as the name of the command and its arguments."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forget(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)


def kinds(calls: list[list[str]]) -> list[Any]:
    """Returns the first words of calls to gcloud: create, describe, ssh, scp, delete."""
    return [call[4] for call in calls]
