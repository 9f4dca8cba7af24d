"""Functions that several modes use."""

import dataclasses
import os
import shutil
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError
from branchnorm_jax.export import ctranslate2
from branchnorm_jax.modes import common
from branchnorm_jax.modes.common import load, read_chunks
from branchnorm_jax.workdir import Workdir


def test_ensemble_members_may_come_from_other_devices(trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    config = configs.load(trained / "config.json")
    elsewhere = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data=8))
    (other / "config.json").write_text(configs.to_json(elsewhere))
    both = load(
        dataclasses.replace(config, decode=dataclasses.replace(config.decode, ensemble=str(other))), Workdir(trained)
    )
    (member,) = both.translator.others
    jax.tree.map(np.testing.assert_array_equal, member.params, both.params)


def test_fast_writers_wait_for_the_reader() -> None:
    """A line is as long as the buffer of a pipe, so the writer is at most one line ahead of the reader."""
    size, most = 65536, 4
    read, write = os.pipe()
    written = 0

    def write_all() -> None:
        nonlocal written
        with os.fdopen(write, "wb", buffering=0) as writer:
            for number in range(20):
                os.write(writer.fileno(), (b"%d" % number).ljust(size - 1, b"x") + b"\n")
                written += 1

    thread = threading.Thread(target=write_all, daemon=True)
    thread.start()
    with os.fdopen(read, "rb") as stream:
        chunks = read_chunks(stream, "stdin", most)
        first = next(chunks)
        # The next chunk, one line that the reader has taken, and one in the pipe, which may be partly written.
        time.sleep(0.5)
        assert len(first) + most <= written <= len(first) + most + 3
        assert len(next(chunks)) == most  # all waiting lines at once
        rest = [line for lines in chunks for line in lines]
    thread.join()
    assert [int(line.rstrip("x")) for line in rest] == list(range(len(first) + most, 20))


def test_stream_can_be_closed_while_waiting_for_a_line() -> None:
    """Otherwise, an error would be reported only after the writer has closed the stream."""
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as writer, os.fdopen(read, "rb") as stream:
        chunks = read_chunks(stream, "stdin", 4)
        writer.write(b"\xff\n")
        with pytest.raises(UserError, match="line 1: not valid UTF-8"):
            next(chunks)


def test_lines_are_read_before_the_writer_continues() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb", buffering=0) as writer:
        chunks = read_chunks(stream, "stdin", 4)
        for line in (b"one\n", b"two\n"):
            writer.write(line)
            assert next(chunks) == [line.decode().strip()]
        writer.close()
        assert list(chunks) == []


def test_lines_that_come_soon_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "PAUSE", 60.0)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb", buffering=0) as writer:
        chunks = read_chunks(stream, "stdin", 4)

        def write_slowly() -> None:
            for number in range(6):
                writer.write(b"%d\n" % number)
                time.sleep(0.01)
            writer.close()

        thread = threading.Thread(target=write_slowly)
        thread.start()
        assert list(chunks) == [["0", "1", "2", "3"], ["4", "5"]]
        thread.join()


def test_lines_of_a_terminal_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "PAUSE", 60.0)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "rb") as stream:
        chunks = read_chunks(stream, "stdin", 4)
        os.write(ours, b"one\n")
        assert next(chunks) == ["one"]
    os.close(ours)


@pytest.mark.parametrize("piped", [False, True])
def test_byte_order_mark_is_dropped_only_at_the_beginning(piped: bool, tmp_path: Path) -> None:
    def lines(text: bytes) -> list[str]:
        (tmp_path / "text").write_bytes(text)
        read, write = os.pipe()
        with os.fdopen(write, "wb") as writer:
            writer.write(text)
        with os.fdopen(read, "rb") as pipe, open(tmp_path / "text", "rb") as file:
            return [line for chunk in read_chunks(pipe if piped else file, "text", 1) for line in chunk]

    assert lines(b"\xef\xbb\xbf>>de<< one\r\n\xef\xbb\xbftwo\n") == [">>de<< one", "\ufefftwo"]
    with pytest.raises(UserError, match="line 1: not valid UTF-8"):
        lines(b"\xef\xbb\xbf\xff\n")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("line\n" * 10)
    with path.open("rb") as stream, pytest.raises(UserError, match="text: the file changed while it was read"):
        for lines in read_chunks(stream, "text", 4):
            assert set(lines) == {"line"}
            os.truncate(path, 15)


def test_an_export_that_cannot_be_opened_is_an_error_of_the_system(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    with pytest.raises(OSError, match=r"Unable to open file 'model\.bin'"):
        common.compared(list, lambda: ctranslate2.log_probs(tmp_path, [["a"]], [["b"]]), "a sentence", "exported")
