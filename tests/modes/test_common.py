"""What several modes need, by itself."""

import dataclasses
import io
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


class Endless(io.BytesIO):
    """A stream like a pipe whose writer is always faster; counts what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.closing = threading.Event()

    def __next__(self) -> bytes:
        if self.closing.is_set():
            raise StopIteration
        self.count += 1
        return b"%d\n" % self.count


def test_what_comes_faster_than_it_is_used_waits() -> None:
    stream, most = Endless(), 4
    chunks = read_chunks(stream, "stdin", most)
    found = next(chunks)
    # The next chunk, and a line in the reader's hand.
    ahead = len(found) + most + 1
    until = time.monotonic() + 10
    while stream.count < ahead and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert stream.count == ahead
    assert len(next(chunks)) == most  # all that is there, at once
    stream.closing.set()
    rest = [line for lines in chunks for line in lines]
    assert rest == list(map(str, range(len(found) + most + 1, stream.count + 1)))


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
    text = b"\xef\xbb\xbf>>de<< one\r\n\xef\xbb\xbftwo\n"
    (tmp_path / "text").write_bytes(text)
    with io.BytesIO(text) if piped else open(tmp_path / "text", "rb") as stream:
        found = [line for lines in read_chunks(stream, "text", 1) for line in lines]
    assert found == [">>de<< one", "\ufefftwo"]
    with pytest.raises(UserError, match="line 1: not valid UTF-8"):
        list(read_chunks(io.BytesIO(b"\xef\xbb\xbf\xff\n"), "text", 1))
