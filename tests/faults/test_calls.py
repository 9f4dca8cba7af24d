"""The supervisor counts the calls that a program makes, and fails exactly the chosen ones."""

import errno
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from faults import calls
from faults.processes import ROOT, Finished
from faults.supervisor import FAILURES, KILL, Fault, unavailable

PROGRAM = """
import os, sys, threading
from pathlib import Path
from faults.supervisor import Fault, supervise

folder, action, place, n, lasting = Path(sys.argv[1]), *sys.argv[2:]
supervise(folder, Fault(place, int(n), action, lasting == "True"), folder.parent / "report")

def write(number):
    try:
        with open(folder / f"part {number}.bin", "wb", buffering=0) as file:
            file.write(b"ab")
            os.fsync(file.fileno())
            file.write(b"cd")
    except OSError as error:
        print(error.errno, flush=True)

for number in range(3):
    thread = threading.Thread(target=write, args=(number,))
    thread.start()
    thread.join()
(folder.parent / "elsewhere").write_text("not counted")
os.chdir(folder)
try:
    os.mkdir("sub")
except OSError as error:
    print(error.errno, flush=True)
os.rename("part 0.bin", "sub/whole.bin")
os.unlink("part 1.bin")
Path("part 2.bin").read_bytes()
sys.exit(7)
"""

EXPECTED = {
    "create part #.bin": 3,
    "write part #.bin": 6,
    "sync part #.bin": 3,
    "make a folder sub": 1,
    "rename sub/whole.bin": 1,
    "delete part #.bin": 1,
    "open part #.bin": 1,
}

needs_supervisor = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")


def supervised(tmp_path: Path, fault: Fault) -> tuple[int, list[int], dict[str, str]]:
    """Runs `PROGRAM`; returns its exit code, the errors that it met, and its files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = [str(folder), fault.action, fault.place, str(fault.n), str(fault.lasting)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.bin")}
    return done.returncode, [int(line) for line in done.stdout.split()], files


@needs_supervisor
def test_calls_are_counted_over_all_threads(tmp_path: Path) -> None:
    code, errors, files = supervised(tmp_path, Fault(""))
    assert (code, errors) == (7, [])
    assert files == {"sub/whole.bin": "abcd", "part 2.bin": "abcd"}
    assert json.loads((tmp_path / "report").read_text()) == {"calls": EXPECTED, "hit": ""}


@needs_supervisor
def test_the_chosen_call_fails_and_no_other(tmp_path: Path) -> None:
    code, errors, files = supervised(tmp_path, Fault("write part #.bin", 4, "ENOSPC"))
    assert (code, errors) == (7, [errno.ENOSPC])
    assert files == {"sub/whole.bin": "abcd", "part 2.bin": "abcd"}  # The second of three files is deleted.
    report = json.loads((tmp_path / "report").read_text())
    assert report["hit"] == "part 1.bin"
    assert report["calls"] == EXPECTED


@needs_supervisor
def test_a_lasting_error_fails_every_later_call_that_can_have_it(tmp_path: Path) -> None:
    code, errors, _ = supervised(tmp_path, Fault("sync part #.bin", 2, "EDQUOT", lasting=True))
    # The second file is not synchronised, the third one and the folder are not created, and a rename ends the program.
    assert (code, errors) == (1, [errno.EDQUOT] * 3)


@needs_supervisor
def test_a_killed_program_does_not_make_the_call(tmp_path: Path) -> None:
    code, errors, files = supervised(tmp_path, Fault("rename sub/whole.bin"))
    assert (code, errors) == (-signal.SIGKILL, [])
    assert sorted(files) == ["part 0.bin", "part 1.bin", "part 2.bin"]


def test_every_call_is_drawn_and_fails_as_it_can() -> None:
    drawn = [calls.draw(EXPECTED, random.Random(number)) for number in range(2000)]
    assert {(fault.place, fault.n) for fault in drawn} == {
        (place, n) for place, count in EXPECTED.items() for n in range(1, count + 1)
    }
    actions = {place: {fault.action for fault in drawn if fault.place == place} for place in EXPECTED}
    assert actions == {
        place: {KILL, *next(errors for does, errors in FAILURES.items() if place.startswith(does))}
        for place in EXPECTED
    }
    assert not any(fault.lasting for fault in drawn if fault.action == KILL)
    assert min(Counter(fault.lasting for fault in drawn).values()) > 200


SAVE = Fault("write checkpoints/#.tmp/params", 1, "ENOSPC")
READ = Fault("open config.json", 1, "EIO")


@pytest.mark.parametrize(
    ("job", "fault", "done", "wrong"),
    [
        ("train", SAVE, Finished(5, "", "StorageError: runs/x: no space"), False),
        ("train", SAVE, Finished(2, "", "UserError: runs/x: no space"), True),
        ("train", SAVE, Finished(5, "", "StorageError: no space"), True),
        ("train", SAVE, Finished(5, "", "a warning\nStorageError: runs/x: no space"), True),
        ("train", SAVE, Finished(1, "", "Traceback (most recent call last):\nOSError: no space"), True),
        ("train", SAVE, Finished(139, "", "runs/x: crashed"), True),
        (
            "train with on_save_failure=warn",
            SAVE,
            Finished(0, "", "StorageError: runs/x: no space; training goes on"),
            False,
        ),
        ("evaluate", READ, Finished(2, "", "UserError: runs/x/config.json: cannot be read"), False),
        ("evaluate", READ._replace(action=KILL), Finished(-9, "", ""), False),
        ("evaluate", READ._replace(action=KILL), Finished(0, "", ""), True),
    ],
)
def test_verdicts(job: str, fault: Fault, done: Finished, wrong: bool) -> None:
    hit = fault.place.partition(" ")[2].replace("#", "5")
    assert bool(calls.verdict(job, Path("runs/x"), fault, hit, done, [])) == wrong


def test_equal_runs_have_the_same_files(tmp_path: Path) -> None:
    names = "checkpoints/8/params/d/{}", "checkpoints/12/params/d/{}", "corpus/.train.{}.tmp/meta.json", "config.json"
    found = []
    for workdir, value in ((tmp_path / "a", "0" * 32), (tmp_path / "b", "0123456789abcdef" * 2)):
        for name in names:
            path = workdir / name.format(value)
            path.parent.mkdir(parents=True) if not path.parent.exists() else None
            path.touch()
        found.append(calls.files_of(workdir))
    assert found[0] == found[1]
    assert "checkpoints/12/params/d/#" in found[0]
    assert not any(name.startswith("checkpoints/8") for name in found[0])
