"""Reading of documents: every character belongs to one document of one split."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data import documents
from branchnorm_jax.data.documents import SHARES, read_documents
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig


def config(folder: Path, **options: Any) -> DataConfig:
    return DataConfig(source="documents", path=str(folder), **{"files": "{split}.txt"} | options)


def read(config: DataConfig, split: str = "train") -> list[str]:
    """Returns the documents of a split."""
    found, parts = [], []
    for text, ends in read_documents(config, split):
        parts.append(text)
        if ends:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def test_a_file_is_a_document_with_every_character(tmp_path: Path) -> None:
    text = "\n a  b\t\r\nzwnj\u200c é\u2028 \x0b last\n\n"
    (tmp_path / "train.txt").write_bytes(text.encode())
    (tmp_path / "valid.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfmark"))
    assert read(config(tmp_path)) == [text]
    assert read(config(tmp_path), "valid") == ["mark"]


def test_a_line_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one \n\ntwo\r\nthree")
    assert read(config(tmp_path, document="line")) == ["one ", "two", "three"]


def test_lines_that_end_as_on_windows_are_divided_by_their_bytes(tmp_path: Path) -> None:
    lines = [f"line{number:03}" for number in range(100)]
    (tmp_path / "all.txt").write_bytes(("\ufeff" + "".join(f"{line}\r\n" for line in lines)).encode())
    whole = config(tmp_path, files="all.txt", document="line")
    assert [read(whole, split) for split in SHARES] == [lines[:90], lines[90:95], lines[95:]]


def test_a_line_of_json_is_a_document(tmp_path: Path) -> None:
    texts = ["one\ntwo\n", " ", "é"]
    (tmp_path / "train.jsonl").write_text("\n \r\n".join(json.dumps({"id": 1, "text": text}) for text in texts))
    assert read(config(tmp_path, files="{split}.jsonl")) == texts


def test_several_files_are_several_documents_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"train.{name}.txt").write_text(name)
    assert read(config(tmp_path, files="{split}.*.txt")) == ["a", "b", "c"]


@given(st.lists(st.text("aé日😀\n", min_size=1), min_size=1, max_size=3), st.booleans())
@settings(max_examples=150)
def test_splits_of_an_undivided_text_divide_it(tmp_path_factory: Any, texts: list[str], by_line: bool) -> None:
    folder = tmp_path_factory.mktemp("text")
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_bytes(text.encode())
    whole = config(folder, files="*.txt", document="line" if by_line else "file")
    found: list[str] = []
    for split, (first, last) in SHARES.items():
        try:
            own = read(whole, split)
        except UserError as error:
            assert "is empty" in str(error)
            own = []
        found += own
        size, total = sum(len(text.encode()) for text in own), sum(len(text.encode()) for text in texts)
        if not by_line:
            assert abs(size - (last - first) * total) <= 8  # a character on each side
    expected = [line for text in texts for line in text.split("\n") if line] if by_line else texts
    assert "".join(found) == "".join(expected)
    if by_line:
        assert found == expected


def test_dividing_a_file_changes_the_version(tmp_path: Path) -> None:
    """train.txt may be a split or the whole text, and its tokens must not be reused for the other."""
    (tmp_path / "train.txt").write_text("a" * 100)
    versions = [documents.version(config(tmp_path, files=files), "train") for files in ("{split}.txt", "train.txt")]
    assert versions[0] != versions[1]
    assert [len(read(config(tmp_path, files=files))[0]) for files in ("{split}.txt", "train.txt")] == [100, 90]


def test_a_file_that_is_too_short_to_divide(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(UserError, match=r"a\.txt: the valid split is empty; data\.files has no \{split\}, so the text"):
        read(config(tmp_path, files="a.txt"), "valid")


def test_only_a_mark_at_the_start_of_a_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(("\ufeff" + "\ufeff" * 100).encode())
    found = "".join(text for split in SHARES for text in read(config(tmp_path, files="*.txt"), split))
    assert found == "\ufeff" * 100


def test_long_lines_and_chunks_do_not_change_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LONGEST", 5)
    monkeypatch.setattr("branchnorm_jax.data.lines._CHUNK_BYTES", 3)
    text = "日本語のテキスト\nab\n" * 3
    (tmp_path / "train.txt").write_bytes(text.encode())
    assert read(config(tmp_path)) == [text]
    assert max(len(part) for part, _ in read_documents(config(tmp_path), "train")) == 5


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("train.txt", b"a\xffb", {}, "train.txt: not valid UTF-8 near byte 1"),
        ("train.txt", b"", {}, "the train split is empty; the files must contain some text"),
        (
            "train.jsonl",
            b'{"body": "a"}\n',
            {"files": "{split}.jsonl"},
            "train.jsonl, line 1: not a JSON object with a text",
        ),
        (
            "train.jsonl",
            b'{"text": "a\\ud800"}\n',
            {"files": "{split}.jsonl"},
            "train.jsonl, line 1: not a JSON object with a text",
        ),
        *(
            ("train.jsonl", text, {"files": "{split}.jsonl"}, "train.jsonl, line 1: not a JSON object with a text")
            for text in (b"[" * 100_000, b'{"text": "a", "text": "b"}')
        ),
        ("other.txt", b"a", {}, "no file matches train.txt"),
        ("train.txt.gz", gzip.compress(b"abc" * 99, mtime=0)[:20], {}, "train.txt.gz: cannot be read"),
    ],
)
def test_faults_are_one_line(tmp_path: Path, name: str, content: bytes, options: Any, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(config(tmp_path, **options))
