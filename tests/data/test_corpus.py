"""Sources of text: pairs read from each source, and error messages for unreadable text."""

import dataclasses
import gzip
import itertools
import json
import lzma
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data import corpus, numerals
from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

ROOT = Path(__file__).resolve().parents[2]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
}
PAIRS = [("a cat", "eine Katze"), ("", "leer"), ("two\u2028dogs", "zwei\x85Hunde"), ("x\ry", "grün")]


def text_config(folder, **options):
    return DataConfig(source="text", path=str(folder), **options)


def write(folder, lines, suffix="", lang="en", split="train"):
    path = folder / f"{split}.{lang}{suffix}"
    path.write_bytes(COMPRESS[suffix]("".join(f"{line}\n" for line in lines).encode()))
    return path


def write_pairs(folder, pairs, suffix="", split="train"):
    return [
        write(folder, side, suffix, lang, split)
        for side, lang in zip(zip(*pairs, strict=True), ("en", "de"), strict=True)
    ]


def error_of(config, split="train"):
    with pytest.raises(UserError) as caught:
        list(read_pairs(config, split))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Text files.


@pytest.mark.parametrize("suffix", COMPRESS)
def test_reads_every_compression(tmp_path, suffix):
    write_pairs(tmp_path, PAIRS, suffix)
    assert list(read_pairs(text_config(tmp_path), "train")) == PAIRS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_reads_concatenated_compressed_files(tmp_path, suffix):
    for path in write_pairs(tmp_path, PAIRS, suffix):
        path.write_bytes(path.read_bytes() * 3)
    assert list(read_pairs(text_config(tmp_path), "train")) == PAIRS * 3


@pytest.mark.parametrize("suffix", COMPRESS)
def test_reads_files_larger_than_its_chunks(tmp_path, suffix):
    lines = [f"{i} " + "x" * (i % 700) for i in range(9000)]
    write_pairs(tmp_path, [(line, line) for line in lines], suffix)
    assert sum(map(len, lines)) > 2 * corpus._CHUNK_BYTES
    assert [source for source, _ in read_pairs(text_config(tmp_path), "train")] == [line.strip() for line in lines]


@given(st.lists(st.binary(max_size=12)))
def test_chunk_borders_do_not_matter(chunks):
    lines = b"".join(chunks).split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert list(corpus._split_lines(iter(chunks))) == expected


def test_strips_windows_line_ends_marks_and_white_space(tmp_path):
    (tmp_path / "train.en").write_bytes("\ufeffone\r\n  two \t\r\n\u00a0three".encode())
    write(tmp_path, "123", lang="de")
    assert list(read_pairs(text_config(tmp_path), "train")) == [("one", "1"), ("two", "2"), ("three", "3")]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_lines_of_a_file_as_they_were_written(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    for text, lines in (
        ("", []),
        ("\n", [""]),
        ("\ufeff a\rb \r\n\n\ufeffc\u2028d\x85\x0b\n", [" a\rb ", "", "\ufeffc\u2028d\x85\x0b"]),
        ("no end", ["no end"]),
    ):
        path.write_bytes(COMPRESS[suffix](text.encode()))
        assert list(corpus.text_lines(path)) == lines
    path.write_bytes(COMPRESS[suffix](b"fine\nb\xff\n"))
    with pytest.raises(UserError, match=f"{path}, line 2: not valid UTF-8 .byte 0xff at position 1"):
        list(corpus.text_lines(path))
    with pytest.raises(UserError, match=f"{tmp_path / 'none'}: cannot be read .No such file or directory"):
        list(corpus.text_lines(tmp_path / "none"))


def test_languages_and_splits_name_the_files(tmp_path):
    write(tmp_path, ["bonjour"], lang="fr", split="dev")
    write(tmp_path, ["hallo"], lang="de", split="dev")
    config = text_config(tmp_path, source_lang="fr", target_lang="de", valid_split="dev")
    assert list(read_pairs(config, "valid")) == [("bonjour", "hallo")]


def test_globs_pair_files_in_the_order_of_their_names(tmp_path):
    for name, suffix in (("b", ".gz"), ("a", ""), ("c", ".xz")):
        for lang in ("en", "de"):
            (tmp_path / f"{name}-train.{lang}{suffix}").write_bytes(COMPRESS[suffix](f"{name} {lang}\n".encode()))
    (tmp_path / "a-train.en.gz").write_bytes(b"the plain file is taken")
    for pattern in ("*-{split}.{lang}", "**/*{split}.{lang}*"):
        pairs = list(read_pairs(text_config(tmp_path, files=pattern), "train"))
        assert pairs == [("a en", "a de"), ("b en", "b de"), ("c en", "c de")]


def test_folder_names_are_no_globs(tmp_path):
    folder = tmp_path / "[data] *"
    folder.mkdir()
    write_pairs(folder, PAIRS)
    assert list(read_pairs(text_config(folder), "train")) == PAIRS


def test_streams(tmp_path):
    source, _ = write_pairs(tmp_path, PAIRS)
    source.write_bytes(b"fine\n" + b"\xff\n" * 3)
    pairs = read_pairs(text_config(tmp_path), "train")
    assert next(pairs) == ("fine", "eine Katze")
    with pytest.raises(UserError):
        next(pairs)


def test_missing_folder(tmp_path):
    assert "data.path" in error_of(text_config(""))
    assert str(tmp_path / "nowhere") in error_of(text_config(tmp_path / "nowhere"))


def test_missing_file_names_the_pattern_and_what_is_there(tmp_path):
    assert "nothing" in error_of(text_config(tmp_path))
    for i in range(10):
        (tmp_path / f"file{i}").touch()
    message = error_of(text_config(tmp_path))
    for part in (str(tmp_path), "train.en", ".gz", ".zst", ".xz", "file0", "file7", "and 2 more"):
        assert part in message
    assert "file8" not in message


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "train.en").mkdir()
    assert "no file matches train.en" in error_of(text_config(tmp_path))


@pytest.mark.parametrize("files", ["{split}.txt", "all.{lang}"])
def test_pattern_must_tell_languages_and_splits_apart(tmp_path, files):
    assert files in error_of(text_config(tmp_path, files=files))


@pytest.mark.parametrize("suffixes", [("", ""), (".gz", ""), ("", ".zst"), (".xz", ".gz")])
@pytest.mark.parametrize(
    "pattern", ["{split}*.{lang}", "{split}*.{lang}*", "*{split}*{lang}", "{split}[.]*{lang}", "**/{split}?*{lang}"]
)
def test_globs_pair_files_of_one_name(tmp_path, suffixes, pattern):
    """Sorting by file name would not pair them: train.ecb.en < train.en, but train.de < train.ecb.de."""
    names = ("train.", "train.ecb.", "train.Tatoeba-2.")
    for lang, suffix in zip(("en", "de"), suffixes, strict=True):
        for name in names:
            (tmp_path / f"{name}{lang}{suffix}").write_bytes(COMPRESS[suffix](f"{name}{lang}\n".encode()))
    for source, target in (("en", "de"), ("de", "en")):
        config = text_config(tmp_path, files=pattern, source_lang=source, target_lang=target)
        found = [tuple(line.rpartition(".")[0] + "." for line in pair) for pair in read_pairs(config, "train")]
        assert sorted(found) == [(name, name) for name in sorted(names)]
        assert found[0] == ("train.Tatoeba-2.", "train.Tatoeba-2.")


@pytest.mark.parametrize("pattern", ["{lang}/{split}-{lang}*.txt", "{lang}/**/{split}-{lang}*"])
def test_the_language_may_come_twice_and_in_folders(tmp_path, pattern):
    names = ("train-{}-b.txt", "train-{}.txt", "train-{}-open.txt")
    for lang in ("en", "de"):
        (tmp_path / lang).mkdir()
        for name in names:
            (tmp_path / lang / name.format(lang)).write_text(name + "\n")
    pairs = list(read_pairs(text_config(tmp_path, files=pattern), "train"))
    assert sorted(pairs) == [(name, name) for name in sorted(names)]


def test_files_come_in_one_order_in_both_directions(tmp_path):
    for name in ("b", "a", "a.x", "a-x"):
        for lang in ("en", "de"):
            (tmp_path / f"train.{name}.{lang}").write_text(f"{name}\n")
    configs = [
        text_config(tmp_path, files="{split}*.{lang}", source_lang=source, target_lang=target)
        for source, target in (("en", "de"), ("de", "en"))
    ]
    assert list(read_pairs(configs[0], "train")) == list(read_pairs(configs[1], "train"))


@pytest.mark.parametrize(
    ("there", "alone", "missing"),
    [
        (("train.en", "train.ecb.en", "train.de"), "train.ecb.en", "train.ecb.de"),
        (("train.en.gz", "train.de", "train.ecb.de.xz"), "train.ecb.de.xz", "train.ecb.en"),
        # The same number on both sides.
        (("train.en", "train.a.en", "train.de", "train.b.de"), "train.a.en", "train.a.de"),
    ],
)
def test_a_file_without_its_counterpart_is_named(tmp_path, there, alone, missing):
    for name in there:
        (tmp_path / name).write_text("x\n")
    message = error_of(text_config(tmp_path, files="{split}*.{lang}"))
    assert message.startswith(f"{tmp_path / alone}: the counterpart {missing} is missing from {tmp_path}")
    assert "data.files={split}*.{lang}" in message


@pytest.mark.parametrize(("sources", "targets"), [(3, 5), (1234, 3), (0, 2)])
def test_unequal_line_counts(tmp_path, sources, targets):
    source = write(tmp_path, ["x"] * sources, ".gz")
    target = write(tmp_path, ["y"] * targets, lang="de")
    message = error_of(text_config(tmp_path))
    assert f"{source} has {sources:,} lines but {target} has {targets:,}" in message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_invalid_utf8_names_file_and_line(tmp_path, suffix):
    write_pairs(tmp_path, [("x", "y")] * 4, suffix)
    path = tmp_path / f"train.de{suffix}"
    path.write_bytes(COMPRESS[suffix](b"ok\nok\nk\xe4se\nok\n"))
    message = error_of(text_config(tmp_path))
    assert message.startswith(f"{path}, line 3:")
    assert "0xe4" in message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_empty_corpus(tmp_path, suffix):
    source, target = write(tmp_path, [], suffix), write(tmp_path, [], suffix, lang="de")
    message = error_of(text_config(tmp_path))
    assert "empty" in message
    assert str(source) in message
    assert str(target) in message


def truncated(data):
    return data[: len(data) // 2]


def garbage(data):
    return b"this was never compressed"


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
@pytest.mark.parametrize("damage", [truncated, garbage, flipped])
def test_corrupt_compressed_file(tmp_path, suffix, damage):
    pairs = [(f"{i} {i * i}", f"{i**3}") for i in range(3000)]
    path, _ = write_pairs(tmp_path, pairs, suffix)
    if suffix == ".zst":  # the checksum is optional in this format
        path.write_bytes(
            zstandard.ZstdCompressor(write_checksum=True).compress(zstandard.decompress(path.read_bytes()))
        )
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path}: cannot be read (" in error_of(text_config(tmp_path))


def test_a_file_that_breaks_off_says_where(tmp_path):
    path, _ = write_pairs(tmp_path, [(f"{i:08}", "x") for i in range(200_000)], ".gz")
    path.write_bytes(path.read_bytes()[:-20])
    # The first chunk is complete and ends inside a line of nine bytes.
    assert f"{path}: cannot be read beyond line {corpus._CHUNK_BYTES // 9} (" in error_of(text_config(tmp_path))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that always fails to be read")
def test_unreadable_file(tmp_path):
    write(tmp_path, ["x"], lang="de")
    (tmp_path / "train.en").symlink_to("/proc/self/mem")
    assert f"{tmp_path / 'train.en'}: cannot be read (" in error_of(text_config(tmp_path))


# Numerals.


def test_numerals():
    config = DataConfig(source_lang="fr", target_lang="de", numerals_pairs=120, train_split="unused")
    for split, count in (("train", 120), ("valid", 500), ("test", 500)):
        pairs = list(read_pairs(config, split))
        assert len(pairs) == count
        assert pairs == list(numerals.pairs(split, "fr", "de", count))


def test_numerals_without_the_language():
    assert "'tlh'" in error_of(DataConfig(source_lang="tlh"))


def test_key_of_numerals_follows_what_the_text_depends_on():
    config = DataConfig(numerals_pairs=200)
    key = corpus_key(config, "train")
    assert key == corpus_key(dataclasses.replace(config, train_split="renamed", vocab_size=99), "train")
    others: list[dict[str, Any]] = [dict(numerals_pairs=201), dict(source_lang="fr"), dict(target_lang="fr")]
    keys = [corpus_key(dataclasses.replace(config, **other), "train") for other in others]
    assert key not in [*keys, corpus_key(config, "valid")]
    assert json.loads(json.dumps(key)) == key


# TFDS. The data sets are written here, by TFDS itself, in the format that `download_and_prepare` leaves.

DE_EN = [{"de": f"Satz {i} ü", "en": f" sentence {i}\n"} for i in range(20)]
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "de-en": DE_EN,
    "en-fr": [{"src": f"e{i}", "dst": f"f{i}"} for i in range(5)],
    "many": [
        {"talk": "t", "texts": {"de": "eins", "en": "one", "fr": "un"}},
        {"talk": "t", "texts": {"en": "two", "fr": "deux"}},
    ],
    "images": [{"label": 1}],
}


@pytest.fixture(scope="session")
def tfds_folder(tmp_path_factory):
    import tensorflow_datasets as tfds

    languages = tfds.features.TranslationVariableLanguages(languages=["de", "en", "fr"])
    features = {
        "de-en": (tfds.features.Translation(languages=("de", "en")), ("de", "en")),
        "en-fr": (
            tfds.features.FeaturesDict({"src": tfds.features.Text(), "dst": tfds.features.Text()}),
            ("src", "dst"),
        ),
        "many": (tfds.features.FeaturesDict({"talk": tfds.features.Text(), "texts": languages}), None),
        "images": (tfds.features.FeaturesDict({"label": tfds.features.ClassLabel(num_classes=2)}), None),
    }

    class TinyTranslate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.3")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in (*features, "never-prepared")]  # noqa: RUF012

        def _info(self):
            kind, keys = features.get(self.builder_config.name, features["de-en"])
            return tfds.core.DatasetInfo(builder=self, features=kind, supervised_keys=keys)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(), "validation": self._generate_examples(3)}

        def _generate_examples(self, count=None):
            yield from itertools.islice(enumerate(EXAMPLES.get(self.builder_config.name, DE_EN)), count)

    folder = tmp_path_factory.mktemp("tfds")
    for name in features:
        tfds.builder(f"tiny_translate/{name}", data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def tfds_config(folder, path="tiny_translate/de-en", **options):
    return DataConfig(source="tfds", path=path, tfds_dir=str(folder), valid_split="validation", **options)


def stripped(examples, source, target):
    return sorted((example[source].strip(), example[target].strip()) for example in examples)


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_tfds_translation(tfds_folder, source, target):
    config = tfds_config(tfds_folder, source_lang=source, target_lang=target)
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, source, target)
    assert list(read_pairs(config, "train")) == list(read_pairs(config, "train"))
    assert len(list(read_pairs(config, "valid"))) == 3
    assert len(list(read_pairs(dataclasses.replace(config, train_split="train[:25%]"), "train"))) == 5


@pytest.mark.parametrize(("source", "target", "keys"), [("en", "fr", ("src", "dst")), ("fr", "en", ("dst", "src"))])
def test_tfds_languages_in_the_name_of_the_config(tfds_folder, source, target, keys):
    config = tfds_config(tfds_folder, "tiny_translate/en-fr", source_lang=source, target_lang=target)
    assert sorted(read_pairs(config, "train")) == stripped(EXAMPLES["en-fr"], *keys)


def test_tfds_many_languages_in_an_example(tfds_folder):
    config = tfds_config(tfds_folder, "tiny_translate/many", source_lang="en", target_lang="de")
    assert sorted(read_pairs(config, "train")) == [("one", "eins"), ("two", "")]


def test_tfds_reads_data_of_its_own_wmt_builder(tfds_folder, tmp_path):
    made, wanted = tfds_folder / "tiny_translate/de-en/1.2.3", tmp_path / "wmt17_translate/de-en/1.0.0"
    shutil.copytree(made, wanted)
    for path in list(wanted.iterdir()):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace("tiny_translate", "wmt17_translate").replace("1.2.3", "1.0.0"))
        path.rename(wanted / path.name.replace("tiny_translate", "wmt17_translate"))
    config = tfds_config(tmp_path, "wmt17_translate/de-en")
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, "en", "de")
    assert corpus_key(config, "train")["builder"] == "wmt17_translate/de-en/1.0.0"


def test_tfds_needs_neither_tensorflow_nor_jax(tfds_folder):
    """Reads in another process, which has the builder's files but not its code."""
    code = (
        "import sys; from branchnorm_jax.data.corpus import *; from branchnorm_jax.options import DataConfig\n"
        "config = DataConfig(source='tfds', path='tiny_translate/de-en', tfds_dir=sys.argv[1])\n"
        "print(len(list(read_pairs(config, 'train'))), {'tensorflow', 'jax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tfds_folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "20 set()\n"


def test_tfds_key_follows_builder_and_split(tfds_folder):
    config = tfds_config(tfds_folder)
    key = corpus_key(config, "train")
    assert key["builder"] == "tiny_translate/de-en/1.2.3"
    assert key == corpus_key(config, "train") == json.loads(json.dumps(key))
    assert key != corpus_key(config, "valid")
    assert key != corpus_key(dataclasses.replace(config, source_lang="de", target_lang="en"), "train")


@pytest.mark.parametrize("name", ["tiny_translate/never-prepared", "wmt17_translate/de-en"])
def test_tfds_not_prepared(tmp_path, name):
    message = error_of(tfds_config(tmp_path, name))
    assert name in message
    assert "array_record" in message
    assert list(tmp_path.iterdir()) == []


def test_tfds_command_of_the_message_prepares_the_data_set(tfds_folder, tmp_path):
    config = tfds_config(tmp_path, "tiny_translate/never-prepared")
    exec(re.findall(r'python -c "(.*)"$', error_of(config))[0])
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, "en", "de")


def test_tfds_prepared_for_tensorflow(tfds_folder, tmp_path):
    folder = tmp_path / "tiny_translate/de-en/1.2.3"
    shutil.copytree(tfds_folder / "tiny_translate/de-en/1.2.3", folder)
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    assert "prepared as tfrecord" in error_of(tfds_config(tmp_path))


@pytest.mark.parametrize(
    ("path", "options", "parts"),
    [
        ("wmt71_translate/de-en", {}, ["wmt71_translate", "did you mean", "wmt1"]),
        ("wmt17_translate/xx-en", {}, ["wmt17_translate", "xx-en"]),
        ("wmt17_translate/de-en:9.9.9", {}, ["9.9.9"]),
        ("", {}, ["data.path"]),
        ("tiny_translate/de-en", {"source_lang": "cs"}, ["cs-de", "de, en", "data.source_lang"]),
        ("tiny_translate/en-fr", {}, ["en-de", "src, dst"]),
        ("tiny_translate/many", {"source_lang": "cs"}, ["cs-de", "texts"]),
        ("tiny_translate/images", {}, ["en-de", "label"]),
        ("tiny_translate/de-en", {"train_split": "training"}, ["'training'", "train, validation"]),
        ("tiny_translate/de-en", {"train_split": "train[:0]"}, ["train[:0]", "no examples"]),
    ],
)
def test_tfds_mistakes(tfds_folder, path, options, parts):
    message = error_of(tfds_config(tfds_folder, path, **options))
    for part in parts:
        assert part in message
