"""Tokens of a text, and the rows of batches: every token is predicted exactly once in an epoch."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data import texts
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.prepare import Corpus, prepare
from branchnorm_jax.data.tokenizer import byte_model, load_tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS, PAD

TEXTS = ["The first document.\n\nIt has two paragraphs.\n", "x", "Ein zweites, mit ß und 😀.\n" * 9]


def prepared(folder: Path, **options: Any) -> tuple[DataConfig, Corpus]:
    """Prepares the texts as three documents."""
    for split in ("train", "valid"):
        for index, text in enumerate(TEXTS):
            (folder / f"{split}.{index}.txt").write_text(text)
    defaults: dict[str, Any] = {"vocab_type": "bytes", "vocab_size": 259, "context": 16, "row_multiple": 1}
    config = DataConfig(source="documents", path=str(folder), files="{split}.*.txt", **defaults | options)
    return config, prepare(config, folder / "run", lambda line: None)


@given(st.text())
def test_bytes_are_the_pieces_of_any_text(text: str) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=byte_model())
    ids = processor.encode(text)
    assert ids == [3 + byte for byte in text.encode()]
    assert processor.decode(ids) == text


def test_stream_begins_and_ends_every_document_with_eos(tmp_path: Path) -> None:
    _, corpus = prepared(tmp_path)
    store = corpus.valid[0].store
    expected = [EOS]
    for text in TEXTS:
        expected += [3 + byte for byte in text.encode()] + [EOS]
    assert store.tokens.tolist() == expected
    assert [store.tokens[start] for start in store.starts] == [EOS] * 4
    assert store.bytes == sum(len(text.encode()) for text in TEXTS)
    lines = [line for text in TEXTS for line in text.splitlines(keepends=True)]
    assert store.line_bytes.tolist() == [len(line.encode()) for line in lines]
    assert store.line_crc32.tolist() == [zlib.crc32(line.encode()) for line in lines]
    assert np.diff(store.lines, prepend=0).sum() == len(expected) - 1


@pytest.mark.parametrize("rows", ["stream", "packed"])
@pytest.mark.parametrize("context", [8, 16, 300])
def test_an_epoch_predicts_every_token_once_from_the_one_before(tmp_path: Path, rows: str, context: int) -> None:
    config, corpus = prepared(tmp_path, rows=rows, context=context)
    plan, _ = make_plans(config, corpus.train, corpus.valid, batch_tokens=4 * context, seed=1)
    tokens = corpus.valid[0].store.tokens
    pairs: list[tuple[int, int]] = []
    for epoch in range(2):
        seen: list[int] = []
        for step in range(plan.batches_per_epoch):
            batch = plan.batch_at(epoch * plan.batches_per_epoch + step)
            assert batch.source.shape == batch.target.shape == (plan.shapes[0].rows, context)
            real = batch.target != PAD
            assert (real == (batch.source != PAD)).all()
            pairs += zip(batch.source[real].tolist(), batch.target[real].tolist(), strict=True)
            seen += batch.target[real].tolist()
        assert sorted(seen) == sorted(tokens[1:].tolist())
    if rows == "stream":
        assert sorted(pairs) == sorted([*zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)] * 2)
    else:
        assert {source for source, target in pairs if (source, target) not in _bigrams(tokens)} <= {EOS}


def _bigrams(tokens: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))


def test_packed_rows_hold_whole_documents(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, rows="packed", context=300)
    plan, _ = make_plans(config, corpus.train, corpus.valid, batch_tokens=600, seed=0)
    batch = plan.batch_at(0)
    documents = [[3 + byte for byte in text.encode()] + [EOS] for text in TEXTS]
    found = []
    for row in batch.target:
        ends = np.flatnonzero(row == EOS)
        assert row[ends[-1] + 1 :].tolist() == [PAD] * (len(row) - ends[-1] - 1)
        found += [part.tolist() for part in np.split(row[: ends[-1] + 1], ends + 1)[:-1]]
    assert sorted(found) == sorted(documents)


def test_long_parts_are_tokenised_in_small_chunks() -> None:
    """A chunk of 1,024 parts of a million characters would take gigabytes."""
    parts = [("a" * (1 << 20), False)] * 11 + [("b", True)] * 2000
    sizes = [sum(len(text) for text, _ in chunk) for chunk in texts._chunks(parts)]
    assert sum(sizes) == 11 * (1 << 20) + 2000
    assert max(sizes) == texts._CHARACTERS


def test_tokens_are_reused_while_the_text_is_the_same(tmp_path: Path) -> None:
    config, first = prepared(tmp_path)
    again = prepare(config, tmp_path / "run", lambda line: None)
    assert again.train.stores[0].store.reused and again.identity() == first.identity()
    (tmp_path / "train.1.txt").write_text("y")
    changed = prepare(config, tmp_path / "run", lambda line: None)
    assert not changed.train.stores[0].store.reused
    assert changed.identity()["train"] != first.identity()["train"]
    assert changed.identity()["valid"] == first.identity()["valid"]


def test_a_changed_text_is_refused_before_its_tokens_are_replaced(tmp_path: Path) -> None:
    config, first = prepared(tmp_path)
    before = (tmp_path / "run" / "corpus" / "train" / "tokens.bin").read_bytes()
    seen: list[dict[str, str]] = []
    prepare(config, tmp_path / "run", lambda line: None, keep=True, check=seen.append)
    assert seen == [first.identity()]
    (tmp_path / "train.1.txt").write_text("y")

    def refuse(identity: dict[str, str]) -> None:
        assert identity["train"] != first.identity()["train"] and identity["valid"] == first.identity()["valid"]
        raise UserError("changed")

    with pytest.raises(UserError, match="changed"):
        prepare(config, tmp_path / "run", lambda line: None, keep=True, check=refuse)
    assert (tmp_path / "run" / "corpus" / "train" / "tokens.bin").read_bytes() == before


def test_word_pieces_keep_the_text(tmp_path: Path) -> None:
    _, corpus = prepared(tmp_path, vocab_type="unigram", vocab_size=34)
    tokenizer = load_tokenizer(tmp_path / "run" / "vocabulary")
    store = corpus.train.stores[0].store
    documents = [store.tokens[store.starts[index] + 1 : store.starts[index + 1]] for index in range(3)]
    assert [tokenizer.text(document) for document in documents] == TEXTS
