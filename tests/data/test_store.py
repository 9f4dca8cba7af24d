"""Token stores: content, reuse, and robustness to kills, races and a full disk."""

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data import store as store_module
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.store import build_store, describe_counts
from branchnorm_jax.data.tokenizer import EOS, Tokenizer, train_tokenizer
from branchnorm_jax.errors import StorageError, UserError
from branchnorm_jax.options import DataConfig
from tests.conftest import largest_file

ROOT = Path(__file__).resolve().parents[2]
WORDS = "one two three four five six seven eight nine ten eleven twelve twenty thirty hundred thousand and"


def random_pairs(count, seed=0, longest=12):
    choose = random.Random(seed)

    def sentence():
        return " ".join(choose.choices(WORDS.split(), k=choose.randint(1, longest)))

    return [(sentence(), sentence()) for _ in range(count)]


def write(folder, pairs, split="train"):
    folder.mkdir(parents=True, exist_ok=True)
    for index, lang in enumerate(("en", "de")):
        (folder / f"{split}.{lang}").write_text("".join(pair[index] + "\n" for pair in pairs), encoding="utf-8")
    return DataConfig(source="text", path=str(folder), max_length=20)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """Trains a vocabulary; returns its directory and the tokenizer."""
    directory = tmp_path_factory.mktemp("vocab") / "v"
    config = DataConfig(vocab_size=50, vocab_type="bpe")
    return directory, train_tokenizer(config, random_pairs(500), directory)


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return vocabulary[1]


def content(store):
    sources = np.split(store.source_tokens, store.source_offsets[1:-1])
    targets = np.split(store.target_tokens, store.target_offsets[1:-1])
    return [(source.tolist(), target.tolist()) for source, target in zip(sources, targets, strict=True)]


def expected_content(tokenizer, pairs, max_length, max_ratio):
    """Returns the expected token ids of each kept pair, and the expected counts."""
    kept, counts = [], dict(read=0, kept=0, empty=0, too_long=0, bad_ratio=0)
    for source, target in pairs:
        ids = tokenizer.encode_source([source])[0], tokenizer.encode_target([target])[0]
        short, long = sorted(map(len, ids))
        if short == 1:
            outcome = "empty"
        elif long > max_length:
            outcome = "too_long"
        elif max_ratio and (long - 1) / (short - 1) > max_ratio:
            outcome = "bad_ratio"
        else:
            outcome = "kept"
            kept.append(ids)
        counts[outcome] += 1
        counts["read"] += 1
    return kept, counts


# Content.


def test_tokens_equal_the_tokens_of_single_lines(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "_CHUNK_PAIRS", 64)  # several chunks and a partial one
    pairs = [("", "x"), *random_pairs(500), ("one", ""), ("one two", " \t")]
    config = write(tmp_path / "text", pairs)
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    kept, counts = expected_content(tokenizer, pairs, 20, 0.0)
    assert content(store) == kept
    assert store.counts == counts
    assert len(store) == counts["kept"] > 100
    assert counts["too_long"] > 10
    assert counts["empty"] == 3


line = st.lists(st.sampled_from([*WORDS.split(), "ü", "\u200b", "日"]), max_size=12).map(" ".join)


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(line, line), min_size=1, max_size=12),
    max_length=st.integers(4, 40),
    max_ratio=st.sampled_from([0.0, 1.0, 1.5, 3.0]),
    filter=st.booleans(),
)
def test_stores_keep_tokens_counts_and_lengths(tokenizer, pairs, max_length, max_ratio, filter):
    with tempfile.TemporaryDirectory() as folder:
        config = write(Path(folder) / "text", pairs, "valid")
        config = dataclasses.replace(config, max_length=max_length, max_ratio=max_ratio)
        kept, counts = expected_content(tokenizer, pairs, max_length, max_ratio if filter else 0.0)
        if not kept:
            with pytest.raises(UserError, match="no pair is left"):
                build_store(config, tokenizer, "valid", Path(folder) / "out", filter)
            return
        for reused in (False, True):
            store = build_store(config, tokenizer, "valid", Path(folder) / "out", filter)
            assert (store.reused, store.counts, content(store)) == (reused, counts, kept)
            assert store.lengths.tolist() == [[len(source), len(target)] for source, target in kept]
        assert counts["read"] == sum(counts.values()) - counts["read"] == len(pairs)


def test_types_and_shapes_of_the_arrays(tmp_path, tokenizer):
    store = build_store(write(tmp_path / "text", random_pairs(50)), tokenizer, "train", tmp_path / "out", True)
    assert isinstance(store.source_tokens, np.memmap)
    assert store.source_tokens.dtype == store.target_tokens.dtype == np.uint16
    assert store.source_offsets.dtype == store.target_offsets.dtype == np.int64
    assert store.source_offsets.shape == (len(store) + 1,)
    assert store.source_offsets[0] == 0
    assert store.target_offsets[-1] == len(store.target_tokens)
    assert (store.lengths.dtype, store.lengths.shape) == (np.int32, (len(store), 2))
    assert all(source[-1] == target[-1] == EOS for source, target in content(store))
    with pytest.raises(ValueError, match="read-only"):
        store.source_tokens[0] = 1


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_large_vocabularies_use_uint32_tokens(tmp_path, size, dtype):
    """Tests vocabularies on both sides of the limit of uint16."""
    codes = [*range(0x4E00, 0x9FA5), *range(0xAC00, 0xD7A4), *range(0x20000, 0x28000)]
    characters = "".join(map(chr, codes[: size - 4]))  # the others are <pad>, </s>, <unk> and the space
    pairs = [(characters[i : i + 500], characters[i : i + 5]) for i in range(0, len(characters), 500)]
    config = dataclasses.replace(write(tmp_path / "text", pairs), vocab_type="bpe", vocab_size=size, max_length=600)
    tokenizer = train_tokenizer(config, pairs, tmp_path / "v")
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert store.source_tokens.dtype == store.target_tokens.dtype == dtype
    assert store.source_tokens.max() == size - 1
    assert content(store) == expected_content(tokenizer, pairs, 600, 0.0)[0]


def test_gather_concatenates_the_sentences(tmp_path, tokenizer):
    store = build_store(write(tmp_path / "text", random_pairs(80)), tokenizer, "train", tmp_path / "out", True)
    ids = np.array([5, 0, len(store) - 1, 5])
    for side, sentences in zip(("source", "target"), zip(*content(store), strict=True), strict=True):
        tokens = store.gather(side, ids)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == [token for i in ids for token in sentences[i]]
    assert store.gather("source", np.array([], int)).shape == (0,)


def test_fingerprint_depends_only_on_text_vocabulary_and_filters(tmp_path, tokenizer):
    pairs = random_pairs(200)
    config = write(tmp_path / "text", pairs)

    def fingerprint(config=config, tokenizer=tokenizer, split="train", filter=True):
        return build_store(config, tokenizer, split, Path(tempfile.mkdtemp(dir=tmp_path)), filter).fingerprint

    first = fingerprint()
    moved = write(tmp_path / "elsewhere", pairs, "valid")
    assert fingerprint(moved, split="valid") == first
    assert fingerprint(dataclasses.replace(config, vocab_size=99, row_multiple=16)) == first
    longer = dataclasses.replace(config, max_ratio=3.0)
    others = [
        fingerprint(write(tmp_path / "edited", [*pairs[:-1], ("one", "two")])),
        fingerprint(write(tmp_path / "swapped", [(target, source) for source, target in pairs])),
        fingerprint(dataclasses.replace(config, max_length=21)),
        fingerprint(longer),
        fingerprint(tokenizer=train_tokenizer(DataConfig(vocab_size=36), pairs, tmp_path / "v")),
    ]
    assert len({first, *others}) == 6
    assert fingerprint(longer, filter=False) == first


def test_fingerprint_depends_on_the_borders_of_sentences(tmp_path, tokenizer):
    stores = []
    for name, pairs in (("a", [("one", "two"), ("three", "four")]), ("b", [("onetwo", ""), ("three", "four")])):
        stores.append(build_store(write(tmp_path / name, pairs), tokenizer, "train", tmp_path / f"out-{name}", True))
    assert stores[0].fingerprint != stores[1].fingerprint


def test_numerals_are_stored_and_reused(tmp_path):
    config = DataConfig(numerals_pairs=300, vocab_size=200)
    tokenizer = train_tokenizer(config, read_pairs(config, "train"), tmp_path / "v")
    for split in ("train", "valid"):
        store = build_store(config, tokenizer, split, tmp_path, split == "train")
        decoded = [tokenizer.decode_target(source) for source, _ in content(store)]
        normalised = [tokenizer.spm[0].normalize(pair[0]) for pair in read_pairs(config, split)]
        assert decoded == [text.replace("▁", " ").strip() for text in normalised]
        assert build_store(config, tokenizer, split, tmp_path, split == "train").reused
    assert not build_store(dataclasses.replace(config, numerals_pairs=301), tokenizer, "train", tmp_path, True).reused


# Counts.


def test_description_of_the_counts(tmp_path, tokenizer):
    pairs = [("one", "two")] * 1200 + [("", "one"), ("one", "")] + [("one " * 30, "one")] * 3 + [("one " * 6, "one")]
    config = write(tmp_path / "text", pairs)
    store = build_store(dataclasses.replace(config, max_ratio=5.0), tokenizer, "train", tmp_path / "out", True)
    line = "train: 1,206 pairs read, 1,200 kept, 3 longer than 20 tokens, 2 with an empty side"
    assert describe_counts("train", store) == f"{line}, 1 with a length ratio above 5"
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert describe_counts("train", store) == line.replace("1,200", "1,201")
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert describe_counts("train", store) == line.replace("1,200", "1,201") + "; tokens reused"


@pytest.mark.parametrize(
    ("pair", "advice"),
    [(("one " * 30, "one"), "data.max_length"), (("one " * 6, "one"), "data.max_ratio"), (("", "one"), "text")],
)
def test_stores_without_pairs_are_rejected(tmp_path, tokenizer, pair, advice):
    config = dataclasses.replace(write(tmp_path / "text", [pair] * 7), max_ratio=5.0)
    with pytest.raises(UserError, match=rf"train: 7 pairs read, 0 kept.*{advice}") as caught:
        build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "out") == []


def test_errors_in_the_text_are_raised_and_leave_no_files(tmp_path, tokenizer):
    config = write(tmp_path / "text", random_pairs(100))
    (tmp_path / "text/train.de").write_bytes(b"x\n" * 99)
    with pytest.raises(UserError, match=r"has 100 lines but .* has 99"):
        build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert os.listdir(tmp_path / "out") == []


# Reuse.


@pytest.fixture
def built(tmp_path, tokenizer):
    """Returns a config and builds its store in tmp_path / "out"."""
    config = write(tmp_path / "text", random_pairs(100))
    build_store(config, tokenizer, "train", tmp_path / "out", True)
    return config


def test_unchanged_text_is_reused(tmp_path, tokenizer, built):
    (tmp_path / "link").symlink_to(tmp_path / "text")
    for path in ("text", "text/../text", "link"):
        config = dataclasses.replace(built, path=str(tmp_path / path), batch_shapes=1)
        store = build_store(config, tokenizer, "train", tmp_path / "out", True)
        assert store.reused
        assert content(store) == expected_content(tokenizer, random_pairs(100), 20, 0.0)[0]


def test_edited_text_is_read_again(tmp_path, tokenizer, built):
    first = build_store(built, tokenizer, "train", tmp_path / "out", True)
    path = tmp_path / "text/train.en"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in reversed(lines)))  # the same size
    os.utime(path, ns=(1, 1))
    store = build_store(built, tokenizer, "train", tmp_path / "out", True)
    assert not store.reused
    assert store.fingerprint != first.fingerprint
    pairs = list(zip(reversed(lines), (pair[1] for pair in random_pairs(100)), strict=True))
    assert content(store) == expected_content(tokenizer, pairs, 20, 0.0)[0]
    assert content(first) == expected_content(tokenizer, random_pairs(100), 20, 0.0)[0]  # still mapped


def test_touched_but_equal_text_keeps_its_fingerprint(tmp_path, tokenizer, built):
    first = build_store(built, tokenizer, "train", tmp_path / "out", True)
    os.utime(tmp_path / "text/train.de", ns=(1, 1))
    store = build_store(built, tokenizer, "train", tmp_path / "out", True)
    assert (store.reused, store.fingerprint) == (False, first.fingerprint)


@pytest.mark.parametrize(
    "change",
    [dict(max_length=19), dict(max_ratio=2.0), dict(source_lang="de", target_lang="en"), dict(files="{split}.{lang}*")],
)
def test_changed_options_rebuild_the_store(tmp_path, tokenizer, built, change):
    store = build_store(dataclasses.replace(built, **change), tokenizer, "train", tmp_path / "out", True)
    assert store.reused == ("files" in change)


def test_changed_vocabulary_rebuilds_the_store(tmp_path, tokenizer, built):
    other = train_tokenizer(DataConfig(vocab_size=45, vocab_type="bpe"), random_pairs(500), tmp_path / "v")
    assert not build_store(built, other, "train", tmp_path / "out", True).reused
    renamed = Tokenizer(other.source_processor, other.target_processor, other.sha256)
    assert build_store(built, renamed, "train", tmp_path / "out", True).reused


def test_changed_format_rebuilds_the_store(tmp_path, tokenizer, built, monkeypatch):
    monkeypatch.setattr(store_module, "_FORMAT", store_module._FORMAT + 1)
    assert not build_store(built, tokenizer, "train", tmp_path / "out", True).reused


FILES = ["source.tokens.bin", "source.offsets.bin", "target.tokens.bin", "target.offsets.bin", "meta.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "flipped"])
def test_damaged_stores_are_rebuilt(tmp_path, tokenizer, built, name, damage):
    path = tmp_path / "out/train" / name
    assert {file.name for file in path.parent.iterdir()} == set(FILES)
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        # The flipped bit keeps meta.json valid: it is in a digit.
        at = next(i for i in range(len(data) // 2, len(data)) if name != "meta.json" or chr(data[i]) in "02468")
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        path.write_bytes({"empty": b"", "truncated": data[:-4], "longer": data + b"1234", "flipped": flipped}[damage])
    store = build_store(built, tokenizer, "train", tmp_path / "out", True)
    assert not store.reused
    assert content(store) == expected_content(tokenizer, random_pairs(100), 20, 0.0)[0]
    assert build_store(built, tokenizer, "train", tmp_path / "out", True).reused


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"key": 1}'])
def test_stores_with_a_foreign_meta_file_are_rebuilt(tmp_path, tokenizer, built, text):
    (tmp_path / "out/train/meta.json").write_text(text)
    assert not build_store(built, tokenizer, "train", tmp_path / "out", True).reused


def test_moved_stores_are_reused(tmp_path, tokenizer, built):
    shutil.move(tmp_path / "out", tmp_path / "new")
    assert build_store(built, tokenizer, "train", tmp_path / "new", True).reused


# Kill, race, full disk.

BUILD = """
import json, sys, time
from pathlib import Path
from branchnorm_jax.data import store
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.options import DataConfig
config, vocabulary, out, pause = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
def slowly(config, split):
    for number, pair in enumerate(read_pairs(config, split)):
        if number == 8500:  # the first chunk is written, the second is not
            print("stuck", flush=True)
            time.sleep(pause)
        yield pair
store.read_pairs = slowly
print(store.build_store(DataConfig(**config), load_tokenizer(vocabulary), "train", out, True).fingerprint)
"""


def start_build(config, directory, out, pause=0):
    """Builds a store in another process, which pauses for `pause` seconds after reading 8500 pairs."""
    command = [
        sys.executable,
        "-c",
        BUILD,
        json.dumps(dataclasses.asdict(config)),
        str(directory),
        str(out),
        str(pause),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_builds_killed_while_writing_leave_no_store(tmp_path, vocabulary):
    directory, tokenizer = vocabulary
    pairs = random_pairs(9000)
    config = write(tmp_path / "text", pairs)
    with start_build(config, directory, tmp_path / "out", pause=60) as process:
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGKILL)
    remaining = os.listdir(tmp_path / "out")
    assert "train" not in remaining
    assert len(remaining) == 1
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert not store.reused
    assert len(store) == store.counts["kept"]
    assert content(store)[-20:] == expected_content(tokenizer, pairs[-200:], 20, 0.0)[0][-20:]
    assert build_store(config, tokenizer, "train", tmp_path / "out", True).reused


def test_concurrent_builds_produce_one_store(tmp_path, vocabulary):
    directory, tokenizer = vocabulary
    pairs = random_pairs(2000)
    config = write(tmp_path / "text", pairs)
    processes = [start_build(config, directory, tmp_path / "out") for _ in range(3)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    store = build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert store.reused
    assert {output[-1] for output in outputs} == {store.fingerprint}
    assert content(store) == expected_content(tokenizer, pairs, 20, 0.0)[0]
    assert os.listdir(tmp_path / "out") == ["train"]


def test_full_disk_is_reported(tmp_path, tokenizer):
    config = write(tmp_path / "text", random_pairs(3000))
    with largest_file(4096), pytest.raises(StorageError) as caught:
        build_store(config, tokenizer, "train", tmp_path / "out", True)
    assert str(caught.value) == f"{tmp_path / 'out/train'}: cannot be written ({os.strerror(errno.EFBIG)})"
    assert os.listdir(tmp_path / "out") == []
    assert not build_store(config, tokenizer, "train", tmp_path / "out", True).reused


def test_unwritable_folders_are_reported(tmp_path, tokenizer):
    config = write(tmp_path / "text", random_pairs(10))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/out/.*\(Not a directory\)"):
        build_store(config, tokenizer, "train", tmp_path / "file/out", True)
