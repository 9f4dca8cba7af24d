"""Sources of text: pairs read from each source, and error messages for unreadable text."""

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data import lines as lines_of
from branchnorm_jax.data import numerals
from branchnorm_jax.data.corpus import check_texts, corpus_key, read_pairs
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

ROOT = Path(__file__).resolve().parents[2]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
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
    assert sum(map(len, lines)) > 2 * lines_of._CHUNK_BYTES
    assert [source for source, _ in read_pairs(text_config(tmp_path), "train")] == [line.strip() for line in lines]


@given(st.lists(st.binary(max_size=12)))
def test_chunk_borders_do_not_matter(chunks):
    lines = b"".join(chunks).split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert list(lines_of._split_lines(iter(chunks))) == expected


def test_strips_line_ends_byte_order_marks_and_white_space(tmp_path):
    (tmp_path / "train.en").write_bytes("\ufeffone\r\n  two \t\r\n\u00a0three".encode())
    write(tmp_path, "123", lang="de")
    assert list(read_pairs(text_config(tmp_path), "train")) == [("one", "1"), ("two", "2"), ("three", "3")]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_lines_keep_the_content_of_lines(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    for text, lines in (
        ("", []),
        ("\n", [""]),
        ("\ufeff a\rb \r\n\n\ufeffc\u2028d\x85\x0b\n", [" a\rb ", "", "\ufeffc\u2028d\x85\x0b"]),
        ("no end", ["no end"]),
    ):
        path.write_bytes(COMPRESS[suffix](text.encode()))
        assert list(lines_of.text_lines(path)) == lines
    path.write_bytes(COMPRESS[suffix](b"fine\nb\xff\n"))
    with pytest.raises(UserError, match=f"{path}, line 2: not valid UTF-8 .byte 0xff at position 1"):
        list(lines_of.text_lines(path))
    with pytest.raises(UserError, match=f"{tmp_path / 'none'}: cannot be read .No such file or directory"):
        list(lines_of.text_lines(tmp_path / "none"))


def test_files_are_selected_by_language_and_split(tmp_path):
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


def test_glob_characters_in_folder_names_are_literal(tmp_path):
    folder = tmp_path / "[data] *"
    folder.mkdir()
    write_pairs(folder, PAIRS)
    assert list(read_pairs(text_config(folder), "train")) == PAIRS


def test_pairs_are_read_lazily(tmp_path):
    source, _ = write_pairs(tmp_path, PAIRS)
    source.write_bytes(b"fine\n" + b"\xff\n" * 3)
    pairs = read_pairs(text_config(tmp_path), "train")
    assert next(pairs) == ("fine", "eine Katze")
    with pytest.raises(UserError):
        next(pairs)


def test_missing_folders_are_reported(tmp_path):
    assert "data.path" in error_of(text_config(""))
    assert str(tmp_path / "nowhere") in error_of(text_config(tmp_path / "nowhere"))
    (tmp_path / "train.en").touch()
    assert "this is a file; give its folder" in error_of(text_config(tmp_path / "train.en"))


def test_missing_file_error_lists_the_pattern_and_the_existing_files(tmp_path):
    assert "nothing" in error_of(text_config(tmp_path))
    for i in range(10):
        (tmp_path / f"file{i}").touch()
    message = error_of(text_config(tmp_path))
    for part in (str(tmp_path), "train.en", ".gz", ".zst", ".xz", ".bz2", "file0", "file7", "and 2 more"):
        assert part in message
    assert "file8" not in message


def test_missing_text_of_one_of_many_directions_is_found_before_others_are_read(tmp_path):
    for lang in ("en", "de"):
        (tmp_path / f"train.{lang}").write_text("text\n")
    languages = "+".join(["de", "en", *(f"x{number}" for number in range(198))])
    config = dataclasses.replace(text_config(tmp_path), pairs=languages)
    check_texts(config.directions("en-de"), ["train"], "data.pairs")
    with pytest.raises(UserError, match=r"train\.x0 .* data\.pairs can select some of the 39,800 directions, such as "):
        check_texts(config.directions(), ["train"], "data.pairs")


def test_folders_do_not_match_file_patterns(tmp_path):
    (tmp_path / "train.en").mkdir()
    assert "no file matches train.en" in error_of(text_config(tmp_path))


@pytest.mark.parametrize("files", ["{split}.txt", "all.{lang}"])
def test_patterns_must_contain_language_and_split(tmp_path, files):
    assert files in error_of(text_config(tmp_path, files=files))


@pytest.mark.parametrize("suffixes", [("", ""), (".gz", ""), ("", ".zst"), (".xz", ".gz"), (".bz2", ".xz")])
@pytest.mark.parametrize(
    "pattern", ["{split}*.{lang}", "{split}*.{lang}*", "*{split}*{lang}", "{split}[.]*{lang}", "**/{split}?*{lang}"]
)
def test_globs_pair_files_with_the_same_name(tmp_path, suffixes, pattern):
    """Sorting by file name would not pair them: train.ecb.en < train.en, but train.de < train.ecb.de."""
    names = ("train.", "train.ecb.", "train.Tatoeba-2.")
    for lang, suffix in zip(("en", "de"), suffixes, strict=True):
        for name in names:
            (tmp_path / f"{name}{lang}{suffix}").write_bytes(COMPRESS[suffix](f"{name}{lang}\n".encode()))
    for source, target in (("en", "de"), ("de", "en")):
        config = text_config(tmp_path, files=pattern, source_lang=source, target_lang=target)
        stems = [tuple(line.rpartition(".")[0] + "." for line in pair) for pair in read_pairs(config, "train")]
        assert sorted(stems) == [(name, name) for name in sorted(names)]
        assert stems[0] == ("train.Tatoeba-2.", "train.Tatoeba-2.")


@pytest.mark.parametrize("pattern", ["{lang}/{split}-{lang}*.txt", "{lang}/**/{split}-{lang}*"])
def test_patterns_may_repeat_the_language_and_use_folders(tmp_path, pattern):
    names = ("train-{}-b.txt", "train-{}.txt", "train-{}-open.txt")
    for lang in ("en", "de"):
        (tmp_path / lang).mkdir()
        for name in names:
            (tmp_path / lang / name.format(lang)).write_text(name + "\n")
    pairs = list(read_pairs(text_config(tmp_path, files=pattern), "train"))
    assert sorted(pairs) == [(name, name) for name in sorted(names)]


def test_file_order_is_the_same_in_both_directions(tmp_path):
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
        # Both sides have the same number of files.
        (("train.en", "train.a.en", "train.de", "train.b.de"), "train.a.en", "train.a.de"),
    ],
)
def test_files_without_a_counterpart_are_named(tmp_path, there, alone, missing):
    for name in there:
        (tmp_path / name).write_text("x\n")
    message = error_of(text_config(tmp_path, files="{split}*.{lang}"))
    assert message.startswith(f"{tmp_path / alone}: the counterpart {missing} is missing from {tmp_path}")
    assert "data.files={split}*.{lang}" in message


@pytest.mark.parametrize(("sources", "targets"), [(3, 5), (1234, 3), (0, 2)])
def test_unequal_line_counts_are_rejected(tmp_path, sources, targets):
    source = write(tmp_path, ["x"] * sources, ".gz")
    target = write(tmp_path, ["y"] * targets, lang="de")
    message = error_of(text_config(tmp_path))
    assert f"{source} has {sources:,} lines but {target} has {targets:,}" in message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_invalid_utf8_error_names_file_and_line(tmp_path, suffix):
    write_pairs(tmp_path, [("x", "y")] * 4, suffix)
    path = tmp_path / f"train.de{suffix}"
    path.write_bytes(COMPRESS[suffix](b"ok\nok\nk\xe4se\nok\n"))
    message = error_of(text_config(tmp_path))
    assert message.startswith(f"{path}, line 3:")
    assert "0xe4" in message


@pytest.mark.parametrize("suffix", COMPRESS)
def test_empty_corpora_are_rejected(tmp_path, suffix):
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


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("damage", [truncated, garbage, flipped])
def test_corrupt_compressed_files_are_rejected(tmp_path, suffix, damage):
    pairs = [(f"{i} {i * i}", f"{i**3}") for i in range(3000)]
    path, _ = write_pairs(tmp_path, pairs, suffix)
    if suffix == ".zst":  # the checksum is optional in this format
        path.write_bytes(
            zstandard.ZstdCompressor(write_checksum=True).compress(zstandard.decompress(path.read_bytes()))
        )
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path}: cannot be read" in error_of(text_config(tmp_path))


def test_truncated_file_error_names_the_last_line_read(tmp_path):
    path, _ = write_pairs(tmp_path, [(f"{i:08}", "x") for i in range(200_000)], ".gz")
    path.write_bytes(path.read_bytes()[:-20])
    complete = zlib.decompressobj(31).decompress(path.read_bytes()).count(b"\n")
    assert f"{path}: cannot be read beyond line {complete} (the compressed file is truncated)" in error_of(
        text_config(tmp_path)
    )


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_files_of_several_frames_are_read_completely_or_refused(tmp_path, suffix):
    frames = [COMPRESS[suffix](text) for text in (b"a\nb\n", b"c\n", b"")]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"".join(frames) + bytes(8))
    assert list(lines_of.text_lines(path)) == ["a", "b", "c"]
    for content in (b"", frames[0] + frames[1][1:], frames[0] + frames[1][:-1], frames[0] + b"more"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            list(lines_of.text_lines(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_files_that_compress_well_are_read_in_small_chunks(tmp_path, suffix):
    (tmp_path / f"x{suffix}").write_bytes(COMPRESS[suffix](bytes(1 << 27)))
    sizes = [len(chunk) for chunk in lines_of.chunks(tmp_path / f"x{suffix}")]
    assert sum(sizes) == 1 << 27
    assert max(sizes) <= 1 << (27 if suffix == ".zst" else 20)


@pytest.mark.parametrize("change", ["longer", "shorter", "written again"])
def test_files_that_change_while_they_are_read_are_refused(tmp_path, change):
    path = tmp_path / "x"
    path.write_text("line\n" * 500_000)
    lines = lines_of.text_lines(path)
    next(lines)
    with path.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.truncate(100) if change == "shorter" else file.write("more")
    if change == "written again":
        path.write_text("line\n" * 500_000)
    with pytest.raises(UserError, match="the file changed while it was read"):
        list(lines)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that always fails to be read")
def test_unreadable_files_are_rejected(tmp_path):
    write(tmp_path, ["x"], lang="de")
    (tmp_path / "train.en").symlink_to("/proc/self/mem")
    assert f"{tmp_path / 'train.en'}: cannot be read (" in error_of(text_config(tmp_path))


# Numerals.


def test_numerals_are_read_for_every_split():
    config = DataConfig(source_lang="fr", target_lang="de", numerals_pairs=120, train_split="unused")
    for split, count in (("train", 120), ("valid", 500), ("test", 500)):
        pairs = list(read_pairs(config, split))
        assert len(pairs) == count
        assert pairs == list(numerals.pairs(split, "fr", "de", count))


def test_numerals_reject_unknown_languages():
    assert "'tlh'" in error_of(DataConfig(source_lang="tlh"))


def test_numerals_key_depends_only_on_options_that_change_the_text():
    config = DataConfig(numerals_pairs=200)
    key = corpus_key(config, "train")
    assert key == corpus_key(dataclasses.replace(config, train_split="renamed", vocab_size=99), "train")
    others: list[dict[str, Any]] = [dict(numerals_pairs=201), dict(source_lang="fr"), dict(target_lang="fr")]
    keys = [corpus_key(dataclasses.replace(config, **other), "train") for other in others]
    assert key not in [*keys, corpus_key(config, "valid")]
    assert json.loads(json.dumps(key)) == key


# TFDS. The fixture writes these data sets with `download_and_prepare` of TFDS itself.

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
def test_tfds_reads_both_directions_and_all_splits(tfds_folder, source, target):
    config = tfds_config(tfds_folder, source_lang=source, target_lang=target)
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, source, target)
    assert list(read_pairs(config, "train")) == list(read_pairs(config, "train"))
    assert len(list(read_pairs(config, "valid"))) == 3
    assert len(list(read_pairs(dataclasses.replace(config, train_split="train[:25%]"), "train"))) == 5


@pytest.mark.parametrize(("source", "target", "keys"), [("en", "fr", ("src", "dst")), ("fr", "en", ("dst", "src"))])
def test_tfds_takes_the_languages_from_the_config_name(tfds_folder, source, target, keys):
    config = tfds_config(tfds_folder, "tiny_translate/en-fr", source_lang=source, target_lang=target)
    assert sorted(read_pairs(config, "train")) == stripped(EXAMPLES["en-fr"], *keys)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (str(Path(__file__).parent), "for a folder of files, set data.source=text"),
        ("wmt17_translate/xx-yy", "BuilderConfig xx-yy not found"),
        ("no/such/name/" + 30 * "of a data set ", r"\.\.\.$"),
    ],
)
def test_wrong_names_of_tfds_get_one_short_line(tfds_folder, path, message):
    with pytest.raises(UserError, match=message) as caught:
        corpus_key(tfds_config(tfds_folder, path), "train")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_tfds_reads_examples_with_many_languages(tfds_folder):
    config = tfds_config(tfds_folder, "tiny_translate/many", source_lang="en", target_lang="de")
    assert sorted(read_pairs(config, "train")) == [("one", "eins"), ("two", "")]


def test_tfds_reads_data_of_the_registered_wmt_builder(tfds_folder, tmp_path):
    made, wanted = tfds_folder / "tiny_translate/de-en/1.2.3", tmp_path / "wmt17_translate/de-en/1.0.0"
    shutil.copytree(made, wanted)
    for path in list(wanted.iterdir()):
        if path.suffix == ".json":
            path.write_text(path.read_text().replace("tiny_translate", "wmt17_translate").replace("1.2.3", "1.0.0"))
        path.rename(wanted / path.name.replace("tiny_translate", "wmt17_translate"))
    config = tfds_config(tmp_path, "wmt17_translate/de-en")
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, "en", "de")
    assert corpus_key(config, "train")["builder"] == "wmt17_translate/de-en/1.0.0"


def test_tfds_imports_neither_tensorflow_nor_jax(tfds_folder):
    """Reads in another process, which has the builder's files but not its code."""
    code = (
        "import sys; from branchnorm_jax.data.corpus import *; from branchnorm_jax.options import DataConfig\n"
        "config = DataConfig(source='tfds', path='tiny_translate/de-en', tfds_dir=sys.argv[1])\n"
        "print(len(list(read_pairs(config, 'train'))), {'tensorflow', 'jax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tfds_folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "20 set()\n"


def test_tfds_key_depends_on_builder_split_and_direction(tfds_folder):
    config = tfds_config(tfds_folder)
    key = corpus_key(config, "train")
    assert key["builder"] == "tiny_translate/de-en/1.2.3"
    assert key == corpus_key(config, "train") == json.loads(json.dumps(key))
    assert key != corpus_key(config, "valid")
    assert key != corpus_key(dataclasses.replace(config, source_lang="de", target_lang="en"), "train")


@pytest.mark.parametrize("name", ["tiny_translate/never-prepared", "wmt17_translate/de-en"])
def test_tfds_unprepared_data_sets_are_rejected(tmp_path, name):
    message = error_of(tfds_config(tmp_path, name))
    assert name in message
    assert "array_record" in message
    assert list(tmp_path.iterdir()) == []


def test_tfds_command_in_the_error_prepares_the_data_set(tfds_folder, tmp_path):
    config = tfds_config(tmp_path, "tiny_translate/never-prepared")
    exec(re.findall(r'python -c "(.*)"$', error_of(config))[0])
    assert sorted(read_pairs(config, "train")) == stripped(DE_EN, "en", "de")


def test_tfds_tfrecord_files_are_rejected(tfds_folder, tmp_path):
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
def test_tfds_invalid_options_are_rejected(tfds_folder, path, options, parts):
    message = error_of(tfds_config(tfds_folder, path, **options))
    for part in parts:
        assert part in message
