"""What several modes need, by itself."""

import dataclasses
import json
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
from branchnorm_jax.modes.common import load, read_chunks
from branchnorm_jax.workdir import Workdir


def test_a_model_of_an_ensemble_may_come_from_other_devices(trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    values = json.loads((other / "config.json").read_text())
    values["parallel"]["data"] = 8
    (other / "config.json").write_text(json.dumps(values))
    config = configs.load(trained / "config.json")
    both = load(
        dataclasses.replace(config, decode=dataclasses.replace(config.decode, ensemble=str(other))), Workdir(trained)
    )
    (member,) = both.translator.others
    jax.tree.map(np.testing.assert_array_equal, member.params, both.params)


def test_what_comes_faster_than_it_is_used_waits() -> None:
    """A line is as long as a pipe's buffer, so that the writer is at most one line ahead of what was read."""
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
        found = next(chunks)
        # The next chunk, a line in the reader's hand, and one in the pipe, which may be begun.
        time.sleep(0.5)
        assert len(found) + most <= written <= len(found) + most + 3
        assert len(next(chunks)) == most  # all that is there, at once
        rest = [line for lines in chunks for line in lines]
    thread.join()
    assert [int(line.rstrip("x")) for line in rest] == list(range(len(found) + most, 20))


def test_a_stream_can_be_closed_while_a_line_is_waited_for() -> None:
    """Or an error would not be told before the writer has gone."""
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as writer, os.fdopen(read, "rb") as stream:
        chunks = read_chunks(stream, "stdin", 4)
        writer.write(b"\xff\n")
        with pytest.raises(UserError, match="line 1: not valid UTF-8"):
            next(chunks)


def test_a_writer_is_answered_before_it_goes_on() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb", buffering=0) as writer:
        chunks = read_chunks(stream, "stdin", 4)
        for line in (b"one\n", b"two\n"):
            writer.write(line)
            assert next(chunks) == [line.decode().strip()]
        writer.close()
        assert list(chunks) == []


@pytest.mark.parametrize("piped", [False, True])
def test_a_byte_order_mark_is_dropped_at_the_beginning_alone(piped: bool, tmp_path: Path) -> None:
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
