"""JSON Lines and event files: what is written can be read, and failures are reported. Hidden modules."""

import importlib
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from branchnorm_jax.errors import StorageError
from branchnorm_jax.training.logs import JsonLines, TensorBoard, hidden, lines_from_end, read_lines
from tests.conftest import ROOT, largest_file


def test_the_lock_of_messages_exists_before_the_first_one() -> None:
    """Ctrl-C during the first message must not become another error."""
    code = "from branchnorm_jax.training import logs; print('_lock' in vars(logs.tqdm))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_lines_of_repeated_updates_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for first, last in ((0, 5), (3, 7)):
        lines = JsonLines(path, first)
        for step in range(first, last):
            lines.write({"step": step, "run": first})
        lines.close()
        assert lines.end == (5 if first else 0)
    assert [(line["step"], line["run"]) for line in read_lines(path)] == [(s, 0 if s < 3 else 3) for s in range(7)]


def test_only_the_last_lines_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged lines before them stay in the file, which may be too large to read."""
    path, step = tmp_path / "lines.jsonl", '{{"step": {}}}\n'.format
    head = f"{step(0)}damaged\n{step(1)}"
    for tail, end in ((step(2) + "xx\n" + step(3), 4), (step(2) + "xx\n" + '{"step": 3', 3), ("", 2), ('{"st', 2)):
        path.write_text(head + tail)
        lines = JsonLines(path, 2)
        assert (path.read_text(), lines.end) == (head, end)
        assert ("lines.jsonl: 1 line could not be read and was deleted" in capsys.readouterr().err) == ("xx" in tail)
        lines.write({"step": 2})
        lines.close()
        assert path.read_text() == head + step(2)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_lines_are_read_from_the_end(block: int, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for content in (b"", b"\n", b"a", b"a\n", b"\n\n", b"ab\n\ncdefg\nh\nunfinished", b"a\nb", b"xyz\nunfinished line"):
        path.write_bytes(content)
        lines, end = [], 0
        for text in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            lines.append(((end := end + len(text)), text))
        assert list(lines_from_end(path, block)) == lines[::-1]


def test_nonfinite_values_are_null(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path, 0)
    lines.write({"step": 0, "loss": float("nan"), "norm": float("inf"), "nll": 0.5})
    lines.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 0,
        "loss": None,
        "norm": None,
        "nll": 0.5,
    }


@pytest.mark.parametrize(
    ("content", "steps", "broken"),
    [
        ('{"step": 1, "a": 1}\n{"step": 2, "a"', [1], 0),
        ('{"step": 1, "a": 1}\nxx\n[1]\n{}\n{"step": 2}\n{"step": 3, "a": 1}\n', [1, 3], 4),
        ("\x00\xff\n", [], 1),
        ("", [], 0),
    ],
    ids=["unfinished", "broken", "binary", "empty"],
)
def test_broken_lines_are_skipped_and_reported(
    content: str, steps: list[int], broken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content.encode("latin-1"))
    assert [line["step"] for line in read_lines(path, ("a",))] == steps
    message = capsys.readouterr().err
    lines = "1 line could not be read and was" if broken == 1 else f"{broken} lines could not be read and were"
    assert (f"lines.jsonl: {lines} left out" in message) == bool(broken)


def test_hidden_modules_cannot_be_imported_unless_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with hidden("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    monkeypatch.setitem(sys.modules, "this", sys)
    with hidden("this"):
        assert importlib.import_module("this") is sys
    assert sys.modules["this"] is sys


@pytest.mark.parametrize("kind", [JsonLines, TensorBoard])
def test_a_log_that_cannot_be_written_is_named(
    kind: Callable[[Path, int], JsonLines | TensorBoard], tmp_path: Path
) -> None:
    """A thread of a library must not hide the error, and the run must not wait for that thread."""
    log = kind(tmp_path / "log", 0)

    def write() -> None:
        for step in range(1000):
            if isinstance(log, TensorBoard):
                log.write(step, {"loss": 1.0})
            else:
                log.write({"step": step})

    with largest_file(1 << 12), pytest.raises(StorageError, match=r"log.*cannot be written \(File too large\)"):
        write()
    log.close()


def test_event_files_have_the_points_and_hide_repeated_ones(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    other = tmp_path / "other"
    TensorBoard(other, 0).close()
    assert not other.exists(), "a start without updates leaves no empty file"
    for _ in range(2):
        again = TensorBoard(other, 0)
        again.write(0, {"loss": 2.5})
        again.close()
    assert len(list(other.iterdir())) == 2, "a second file in the same second replaces none"
    board = TensorBoard(tmp_path, 3)
    board.write(3, {"loss": 2.5, "norm": math.nan})
    board.write(4, {"loss": 1.5, "valid/nll": 0.5})
    board.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    content, events = path.read_bytes(), []
    while content:  # A record is its length, a checksum of it, the event, and a checksum of the event.
        (size,) = struct.unpack("<Q", content[:8])
        events.append(event_pb2.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    first, start, *points = events
    assert all(abs(event.wall_time - time.time()) < 600 for event in events)
    assert first.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, event_pb2.SessionLog.START)
    values = [(event.step, value.tag, value.simple_value) for event in points for value in event.summary.value]
    assert values == [(3, "loss", 2.5), (4, "loss", 1.5), (4, "valid/nll", 0.5)]
