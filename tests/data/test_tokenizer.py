"""Tokenizer: ids, round trips, determinism, and error messages for unsuitable text."""

import concurrent.futures
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.tokenizer import (
    EOS,
    PAD,
    UNK,
    atomic_directory,
    load_tokenizer,
    train_text_tokenizer,
    train_tokenizer,
)
from branchnorm_jax.errors import StorageError, UserError
from branchnorm_jax.options import DataConfig

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = "the a red blue house tree runs walks under over < / > pad s 0 x 4 1 quickly"
GERMAN = "der die rote blaue Häuser Bäume läuft geht unter über schnell größer"


def sentences(words, count=400):
    choose = random.Random(0)
    return [" ".join(choose.choices(words.split(), k=6)) for _ in range(count)]


PAIRS = list(zip(sentences(ENGLISH), sentences(GERMAN), strict=True))


def config_of(**options):
    return DataConfig(**{"vocab_size": 60} | options)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request, tmp_path_factory):
    return train_tokenizer(config_of(vocab_type=request.param), PAIRS, tmp_path_factory.mktemp("vocab") / "v")


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def byte_tokenizer(request, tmp_path_factory):
    config = config_of(vocab_type=request.param, byte_fallback=True, vocab_size=320)
    return train_tokenizer(config, PAIRS, tmp_path_factory.mktemp("vocab") / "v")


def test_special_ids_and_sizes(tokenizer):
    assert (PAD, EOS, UNK) == (0, 1, 2)
    processor = tokenizer.source_processor
    assert tokenizer.source_pieces == tokenizer.target_pieces
    assert [processor.id_to_piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert processor.bos_id() == -1
    assert tokenizer.source_size == tokenizer.target_size == 60
    assert tokenizer.encode_source([]) == []
    assert tokenizer.encode_source(["", " "]) == [[EOS], [EOS]]
    assert UNK in tokenizer.encode_target(["日本"])[0]


words = st.lists(st.text("".join(sorted(set(ENGLISH + GERMAN) - {" "})), min_size=1), max_size=8)


@given(words)
def test_round_trip_of_known_characters(tokenizer, words):
    text = " ".join(words)
    for encode in (tokenizer.encode_source, tokenizer.encode_target):
        (ids,) = encode([text])
        assert ids[-1] == EOS
        assert not {PAD, EOS, UNK} & set(ids[:-1])
        assert tokenizer.decode_target(ids) == text


@given(st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="\u2581\u2585")))
def test_byte_fallback_encodes_every_character(byte_tokenizer, text):
    text = byte_tokenizer.source_processor.normalize(text).replace("▁", " ").strip()
    (ids,) = byte_tokenizer.encode_source([text])
    assert UNK not in ids
    assert byte_tokenizer.decode_target(ids) == text


def test_decoding_stops_at_eos_and_ignores_padding(tokenizer):
    (ids,) = tokenizer.encode_target(["der rote"])
    rest = tokenizer.encode_target(["schnell"])[0]
    assert tokenizer.decode_target([PAD, *ids[:1], PAD, *ids[1:], *rest, PAD]) == "der rote"
    assert tokenizer.decode_target(np.array(ids + rest, np.int32)) == "der rote"
    assert tokenizer.decode_target([EOS]) == tokenizer.decode_target([]) == ""


LITERALS = ["</s>", "<pad>", "<s>", "a </s> <pad> red<pad>house</s>", "<0x41>"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_literal_control_symbols_are_text(tmp_path, kind, byte_fallback):
    pairs = PAIRS + [(text, text) for text in LITERALS] * 20
    config = config_of(vocab_type=kind, byte_fallback=byte_fallback, vocab_size=320 if byte_fallback else 60)
    tokenizer = train_tokenizer(config, pairs, tmp_path / "v")
    for text, ids in zip(LITERALS, tokenizer.encode_source(LITERALS), strict=True):
        assert not {PAD, EOS, UNK} & set(ids[:-1])
        assert tokenizer.decode_target(ids) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_same_text_gives_the_same_vocabulary(tmp_path, kind):
    config = config_of(vocab_type=kind)
    first = train_tokenizer(config, PAIRS, tmp_path / "1")
    second = train_tokenizer(config, iter(PAIRS), tmp_path / "2")
    assert (tmp_path / "1/source.model").read_bytes() == (tmp_path / "2/source.model").read_bytes()
    assert first.sha256 == second.sha256 == load_tokenizer(tmp_path / "1").sha256
    other = train_tokenizer(config, PAIRS[:200], tmp_path / "3")
    assert re.fullmatch("[0-9a-f]{64}", other.sha256)
    assert other.sha256 != first.sha256


def test_vocab_file_lists_the_pieces(tmp_path):
    tokenizer = train_tokenizer(config_of(), PAIRS, tmp_path / "v")
    pieces = [line.split("\t")[0] for line in (tmp_path / "v/source.vocab").read_text(encoding="utf-8").splitlines()]
    assert pieces == [tokenizer.spm[0].id_to_piece(i) for i in range(60)]


def test_separate_vocabularies_cover_only_their_own_side(tmp_path):
    tokenizer = train_tokenizer(config_of(shared_vocab=False, vocab_size=38), PAIRS, tmp_path / "v")
    assert {path.name for path in (tmp_path / "v").iterdir()} == {
        f"{side}.{kind}" for side in ("source", "target") for kind in ("model", "vocab")
    }
    for tokens in (tokenizer, load_tokenizer(tmp_path / "v")):
        assert (tokens.source_size, tokens.target_size, tokens.sha256) == (38, 38, tokenizer.sha256)
        assert UNK not in tokens.encode_source(["quickly"])[0]
        assert UNK in tokens.encode_target(["quickly"])[0]
        assert UNK not in tokens.encode_target(["größer"])[0]
        assert UNK in tokens.encode_source(["größer"])[0]
        assert "".join(tokens.source_pieces_of(tokens.encode_source(["red house"])[0])) == "▁red▁house</s>"
        assert tokens.decode_target(tokens.encode_target(["rote Häuser"])[0]) == "rote Häuser"


@pytest.mark.parametrize("shared", [True, False])
def test_training_sample_is_even_and_within_the_limit(tmp_path, shared):
    """Every sentence has a unique character, which shows whether the sentence was in the sample."""
    pairs = [(source + " " + chr(0x4E00 + i), target) for i, (source, target) in enumerate(PAIRS)]
    config = config_of(vocab_type="bpe", vocab_size=180, shared_vocab=shared, vocab_sentences=100)
    if not shared:
        pairs = [(source, source) for source, _ in pairs]
    tokenizer = train_tokenizer(config, pairs, tmp_path / "v")
    used = [i for i in range(len(pairs)) if UNK not in tokenizer.encode_source([chr(0x4E00 + i)])[0]]
    assert used == list(range(0, 400, 8 if shared else 4))
    assert len(used) == (50 if shared else 100)


def test_long_and_unusual_lines_are_not_ignored(tmp_path):
    long = " ".join(["x" * 30] * 2000) + " 一二三 " + "\U00020001" * 2500 + "四"
    config = config_of(vocab_size=70, max_length=10_000)
    tokenizer = train_tokenizer(config, [*PAIRS, (long, "五 \u2585 六 \0 七")], tmp_path / "v")
    for character in "一二三四五六七\U00020001":
        assert UNK not in tokenizer.encode_source([character])[0]


def test_lines_that_training_leaves_out_get_no_pieces(tmp_path):
    """A line of 60,000 letters has more than 256 pieces of 16 letters, and a pair with an empty side is not used."""
    extra = [("q" * 60_000, "kurz"), ("", "w w w")]
    tokenizer = train_tokenizer(config_of(), [*PAIRS, *extra], tmp_path / "1")
    assert tokenizer.sha256 == train_tokenizer(config_of(), PAIRS, tmp_path / "2").sha256
    longer = train_tokenizer(config_of(max_length=4000), [*PAIRS, *extra], tmp_path / "3")
    assert any("q" in piece for piece in longer.source_pieces)


def number_after(words, caught):
    return int(re.findall(rf"{words} (\d+)", str(caught.value))[0])


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("shared", [True, False])
def test_too_large_vocabulary_error_names_the_largest_valid_size(tmp_path, kind, shared):
    options = dict(vocab_type=kind, shared_vocab=shared)
    with pytest.raises(UserError, match=r"data.vocab_size=3800 is too large .* at most (\d+) pieces") as caught:
        train_tokenizer(config_of(vocab_size=3800, **options), PAIRS, tmp_path / "v")
    most = number_after("at most", caught)
    assert ("training text" if shared else "source side") in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if not shared:
        same = [(source, source) for source, _ in PAIRS]
        assert train_tokenizer(config_of(vocab_size=most, **options), same, tmp_path / "v").source_size == most
        return
    assert train_tokenizer(config_of(vocab_size=most, **options), PAIRS, tmp_path / "v").source_size == most
    with pytest.raises(UserError, match=f"at most {most} pieces"):
        train_tokenizer(config_of(vocab_size=most + 1, **options), PAIRS, tmp_path / "v")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_too_small_vocabulary_error_names_the_smallest_valid_size(tmp_path, kind):
    with pytest.raises(UserError, match=r"data.vocab_size=16 is too small .* need \d+ pieces") as caught:
        train_tokenizer(config_of(vocab_size=16, vocab_type=kind), PAIRS, tmp_path / "v")
    least = number_after("need", caught)
    train_tokenizer(config_of(vocab_size=least, vocab_type=kind), PAIRS, tmp_path / "v")
    with pytest.raises(UserError, match="too small"):
        train_tokenizer(config_of(vocab_size=least - 1, vocab_type=kind), PAIRS, tmp_path / "v")


@pytest.mark.parametrize("pairs", [[], [("", "")], [(" ", "\t")] * 3])
@pytest.mark.parametrize("shared", [True, False])
def test_empty_training_text_is_rejected(tmp_path, pairs, shared):
    with pytest.raises(UserError, match="empty"):
        train_tokenizer(config_of(shared_vocab=shared), pairs, tmp_path / "v")


def test_errors_in_the_text_are_raised(tmp_path):
    def pairs():
        yield from PAIRS
        raise UserError("line 401 is broken")

    with pytest.raises(UserError, match="line 401"):
        train_tokenizer(config_of(), pairs(), tmp_path / "v")


def test_a_signal_stops_the_training_at_once(tmp_path):
    """As Ctrl-C does, while SentencePiece reads the text."""
    over = threading.Event()

    class Line(str):
        def removesuffix(self, suffix):
            return self

        def translate(self, table):
            os.kill(os.getpid(), signal.SIGINT)
            assert over.wait(60)
            return self

    with pytest.raises(KeyboardInterrupt):
        train_text_tokenizer(config_of(), ["a line", Line("another line")], tmp_path / "v")
    over.set()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_line_ends_of_language_models_are_pieces(tmp_path, kind):
    texts = [f"{source}\r\n" for source, _ in PAIRS]
    tokenizer = train_text_tokenizer(config_of(vocab_type=kind), texts, tmp_path / "v")
    (ids,) = tokenizer.encode_target(["".join(texts)])
    assert UNK not in ids
    assert tokenizer.text(ids[:-1]) == "".join(texts)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_training_prints_nothing(tmp_path, capfd, kind):
    train_tokenizer(config_of(vocab_type=kind), [*PAIRS, ("x" * 5000, "\u2585")], tmp_path / "v")
    with pytest.raises(UserError):
        train_tokenizer(config_of(vocab_type=kind, vocab_size=9999), PAIRS, tmp_path / "w")
    assert capfd.readouterr() == ("", "")


def test_encoding_and_decoding_are_thread_safe(tokenizer):
    lines = [source for source, _ in PAIRS]
    alone = [tokenizer.encode_source([line])[0] for line in lines]
    assert tokenizer.encode_source(lines) == alone
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode_source, [lines] * 16)) == [alone] * 16
        assert list(pool.map(tokenizer.decode_target, alone)) == lines


# Loading.


def test_missing_vocabularies_are_rejected(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "v"))):
        load_tokenizer(tmp_path / "v")
    train_tokenizer(config_of(shared_vocab=False, vocab_size=38), PAIRS, tmp_path / "v")
    (tmp_path / "v/target.model").unlink()
    with pytest.raises(UserError, match="no vocabulary"):
        load_tokenizer(tmp_path / "v")


@pytest.mark.parametrize("damage", [b"", b"no model", 0.5, 0.99])
def test_corrupt_vocabularies_are_rejected(tmp_path, capfd, damage):
    train_tokenizer(config_of(), PAIRS, tmp_path / "v")
    path = tmp_path / "v/source.model"
    data = path.read_bytes()
    path.write_bytes(damage if isinstance(damage, bytes) else data[: int(damage * len(data))])
    with pytest.raises(UserError, match=re.escape(str(path))) as caught:
        load_tokenizer(tmp_path / "v")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_vocabularies_with_other_special_ids_are_rejected(tmp_path):
    model = io.BytesIO()
    lines = iter([source for source, _ in PAIRS])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=40, minloglevel=2)
    (tmp_path / "vocab.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match=r"\(-1, 2, 0\)"):
        load_tokenizer(tmp_path)


# Writing.


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_atomic_directory_replaces_all_files_at_once(tmp_path):
    final = tmp_path / "a/b"
    with atomic_directory(final) as temporary:
        (temporary / "x").write_text("1")
        assert not final.exists()
    with atomic_directory(final) as temporary:
        (temporary / "y").write_text("2")
        assert content(final) == {"x": "1"}
    assert content(final) == {"y": "2"}
    with pytest.raises(ZeroDivisionError), atomic_directory(final) as temporary:
        (temporary / "z").write_text("3")
        raise ZeroDivisionError
    assert content(final) == {"y": "2"}
    assert os.listdir(final.parent) == ["b"]


def test_atomic_directory_keeps_the_last_of_two_writers(tmp_path):
    with atomic_directory(tmp_path / "v") as first, atomic_directory(tmp_path / "v") as second:
        (first / "x").write_text("1")
        (second / "x").write_text("2")
    assert content(tmp_path / "v") == {"x": "1"}
    assert os.listdir(tmp_path) == ["v"]


def test_atomic_directory_of_a_killed_process_is_not_created(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from branchnorm_jax.data.tokenizer import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as temporary:\n"
        "  (temporary / 'x').write_text('partial'); print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "v")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "v").exists()
    with atomic_directory(tmp_path / "v") as temporary:
        (temporary / "x").write_text("whole")
    assert content(tmp_path / "v") == {"x": "whole"}


def test_unwritable_directories_are_reported(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file/v"):
        with pytest.raises(StorageError, match=r"file.*\(Not a directory\)"):
            train_tokenizer(config_of(), PAIRS, directory)
    assert os.listdir(tmp_path) == ["file"]
