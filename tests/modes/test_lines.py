"""Translation of files: no line is lost or repeated, whatever it contains and whenever the process dies."""

import dataclasses
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes import lines
from branchnorm_jax.modes.common import load
from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir
from tests.conftest import run_main

UNUSUAL = [
    *("twenty-one", "", "   ", "one hundred", "😀 🏳️‍🌈", "שלום עולם", "nul\0here", "a\u2028b", "tab\tx", "c\rd", "\x07"),
    " ".join(["seven"] * 3000),
    *("nine", "ten", "eleven"),
]


def options(workdir: Path, **decode: Any) -> Config:
    config = configs.load(workdir / "config.json")
    return dataclasses.replace(config, decode=dataclasses.replace(config.decode, **decode))


@pytest.mark.slow
@pytest.mark.parametrize("nbest", [1, 2])
def test_interrupted_translation_continues(
    trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, nbest: int
) -> None:
    monkeypatch.setattr(lines, "CHUNK", 4)
    source, complete, other = tmp_path / "in", tmp_path / "whole", tmp_path / "other"
    source.write_text("\n".join(UNUSUAL) + "\n", encoding="utf-8", newline="")
    decode: dict[str, Any] = dict(beam_size=2, nbest=nbest, max_length_a=0.0, max_length_b=6, max_input_length=20)
    config = options(trained, **decode)
    run = load(config, Workdir(trained))
    lines.translate_file(config, run, source, complete)
    expected = complete.read_bytes()
    assert expected.count(b"\n") == len(UNUSUAL) * nbest
    assert not complete.with_name("whole.part").exists()

    original, calls = Translator.translate, 0

    def dies(self: Translator, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, *arguments, **named)

    monkeypatch.setattr(Translator, "translate", dies)
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(KeyboardInterrupt):
        lines.translate_file(config, run, source, tmp_path / "link")
    part = tmp_path / "other.part"
    assert f"{part}: it keeps the finished lines, and the same command continues" in capsys.readouterr().err
    assert part.read_bytes() == b"".join(expected.splitlines(keepends=True)[: 8 * nbest])
    with open(part, "ab") as file:
        file.write(b"half a li")
    lines.translate_file(config, run, source, other)
    assert calls == 5  # the third and fourth chunk; the first two were complete
    assert other.read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "link", "other", "whole"]
    assert (tmp_path / "link").is_symlink()

    # A part that was made with other options is discarded.
    calls = 1
    with pytest.raises(KeyboardInterrupt):
        lines.translate_file(config, run, source, other)
    capsys.readouterr()
    lines.translate_file(options(trained, **(decode | {"min_length": 3, "length_penalty": 0.5})), run, source, other)
    assert calls == 3 + 4
    assert (
        f"{part}: translating {4 * nbest} lines again, because they were made with different length_penalty, min_length"
        in capsys.readouterr().err
    )


def test_files_of_the_user_are_not_replaced(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("one\n")
    for name, content in (("a.part", "notes"), ("b.part.json", '{"my": "settings"}'), ("c.part.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}: exists, and does not belong to a translation"):
            lines.check_files(tmp_path / "in", tmp_path / name[0])
        assert (tmp_path / name).read_text() == content
    for name in ("d", "d.part", "d.part.json"):
        (tmp_path / name).write_text("one\n")
        with pytest.raises(UserError, match=f"{name} is decode.input, and would be replaced"):
            lines.check_files(tmp_path / name, tmp_path / "d")
        with pytest.raises(UserError, match=f"{name} is decode.glossary, and would be replaced"):
            lines.check_files(tmp_path / "in", tmp_path / "d", tmp_path / name)
        (tmp_path / name).unlink()
    (tmp_path / "d").write_text("older")
    for glossary in ("in", "missing"):
        lines.check_files(tmp_path / "in", tmp_path / "d", tmp_path / glossary)


def test_faulty_lines_are_found_before_the_first_translation(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "CHUNK", 2)
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("translated"))
    (tmp_path / "in").write_bytes(b"one\ntwo\nthree\n\xff\n")
    config = options(trained)
    with pytest.raises(UserError, match="in, line 4: not valid UTF-8"):
        lines.translate_file(config, load(config, Workdir(trained)), tmp_path / "in", tmp_path / "out")
    (tmp_path / "in").write_bytes(b"one\tein\ntwo\t\nthree\n")
    config = options(trained, target_prefix=True, input="in")
    with pytest.raises(UserError, match="in, line 3: expected source<TAB>prefix"):
        lines.translate_file(config, load(config, Workdir(trained)), tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_input_and_output_options(trained: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("one\nTwo is it. Three is it.\nOne is it. Two is it.\n", encoding="utf-8")
    command = f"--workdir={trained}", "--mode=translate", f"--config.decode.input={source}"
    done = run_main(*command, f"--config.decode.output={target}", "--config.decode.token_scores=True")
    assert done.returncode == 0, done.stderr
    first = target.read_text(encoding="utf-8").splitlines()
    assert len(first) == 3
    assert "line 2 has several sentences; " in done.stderr
    assert done.stderr.count("has several sentences") == 1
    assert all(" ||| " in line and "</s>:" in line for line in first)
    done = run_main(*command, "--config.decode.target_prefix=True")
    assert done.returncode == 2
    assert f"{source}, line 1: expected source<TAB>prefix of the target, not 1 field" in done.stderr
    done = run_main(f"--workdir={trained}", "--mode=translate", f"--config.decode.output={target}")
    assert done.returncode == 2
    assert "decode.input" in done.stderr


def test_messages_about_a_line_name_the_file(trained: Path, capsys: Any) -> None:
    """Only the vocabulary of the model with few learned positions matters here."""
    config = options(trained, target_prefix=True, input="a.tsv", max_length_a=0.0, max_length_b=2)
    run = load(config, Workdir(trained))
    model = run.translator.model
    few = dataclasses.replace(model, config=dataclasses.replace(model.config, positions="learned", max_positions=8))
    short = run._replace(translator=dataclasses.replace(run.translator, model=few))
    long, chunk = " ".join(["seven"] * 20), [["one\teins"], ["two\tzwei", "three\t😀"]]
    with pytest.raises(UserError, match=r"a.tsv, line 3: longer than the 8 positions of the model"):
        list(lines.scored(config, short, iter([["", "", f"one\t{long}"]]), "a.tsv"))
    with pytest.raises(UserError, match=r"a.tsv, line 1: the prefix has \d+ tokens, and the model has 8 positions"):
        list(lines.translated(config, short, iter([[f"one\t{long}"]]), 0, 1))
    with pytest.raises(UserError, match=r"a.tsv, line 3: the model cannot write '😀'"):
        list(lines.translated(config, run, iter(chunk), 0, 3))
    cut = options(trained, split="none", max_input_length=4, input="a.txt")
    list(lines.translated(cut, load(cut, Workdir(trained)), iter([[long]]), 0, 1))
    assert "a.txt, line 1: cut from" in capsys.readouterr().err


def test_unwritable_outputs_are_rejected(tmp_path: Path) -> None:
    """Devices and pipes are rejected, because the finished file would replace them."""
    source, pipe = tmp_path / "in", tmp_path / "pipe"
    source.write_text("one\n")
    os.mkfifo(pipe)
    for target, message in (
        (pipe, "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "a" / "b", "its folder does not exist"),
        (tmp_path / "out.gz", "plain text; choose a name without .gz"),
    ):
        with pytest.raises(UserError, match=f"decode.output={target}: .*{message}"):
            lines.check_files(source, target)
    for source, message in (
        (tmp_path / "none", f"{tmp_path}/none: cannot be read: No such file"),
        (pipe, f"decode.input={pipe}: decode.output needs a regular file"),
        (Path(), "decode.output needs decode.input=<file>"),
    ):
        with pytest.raises(UserError, match=message):
            lines.check_files(source, tmp_path / "out")
    with pytest.raises(UserError, match=r"cannot be written: Is a directory"), lines.writable(tmp_path):
        pass


@pytest.mark.parametrize("target", ["loop", "elsewhere/out"])
def test_outputs_may_be_links(trained: Path, tmp_path: Path, target: str) -> None:
    """A link of a loop is replaced; another link stays, and its target is written."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "loop").symlink_to(target)
    (tmp_path / "in").write_text("one\n")
    config = configs.load(trained / "config.json")
    lines.translate_file(config, load(config, Workdir(trained)), tmp_path / "in", tmp_path / "loop")
    assert (tmp_path / target).read_text().count("\n") == 1
    assert (tmp_path / "loop").is_symlink() == (target != "loop")


def test_two_processes_cannot_write_the_same_translation(tmp_path: Path) -> None:
    part = tmp_path / "out.part"
    with lines.writable(part) as first:
        first.write(b"one\n")
        # A lock belongs to an open file, not to a process, so this process can act as the second one.
        with pytest.raises(UserError, match="another process is writing"), lines.writable(part):
            pass
    with lines.writable(part) as again:
        again.write(b"two\n")
    assert part.read_bytes() == b"one\ntwo\n"


@pytest.mark.slow
def test_alignments_in_pharaoh_format(trained: Path, tmp_path: Path) -> None:
    """Every piece of the translation occurs once, in order, aligned to a piece of the source."""
    source, text = tmp_path / "in", ["twenty-one", "", "one hundred and ten"]
    source.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    command = f"--workdir={trained}", "--mode=translate", f"--config.decode.input={source}"
    for options in ((), ("--config.decode.nbest=2", "--config.decode.alignment_layer=2")):
        done = run_main(
            *command, "--config.decode.alignments=True", "--config.decode.token_scores=True",
            "--config.decode.no_repeat_ngram=1", *options,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed = [line.split(" ||| ") for line in done.stdout.splitlines()]
        lengths = [len(ids) - 1 for ids in load_tokenizer(trained / "vocabulary").encode_source(text)]
        for number, (*_, pieces, alignment) in enumerate(printed):
            pairs = [tuple(map(int, pair.split("-"))) for pair in alignment.split()]
            length = lengths[number * len(text) // len(printed)]
            if length:
                assert [j for _, j in pairs] == list(range(len(pieces.split()) - 1))
                assert all(0 <= i < length for i, _ in pairs)
            else:
                assert pairs == []
    done = run_main(*command, "--config.decode.alignment_layer=3")
    assert done.returncode == 2
    assert "alignment_layer=3 is more than model.decoder_layers=2" in done.stderr


def test_target_prefixes_are_kept(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text("twenty-one\tneunund\n\ntwo\t\n", encoding="utf-8")
    done = run_main(
        f"--workdir={trained}", "--mode=translate", f"--config.decode.input={source}",
        "--config.decode.target_prefix=True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, blank, last = done.stdout.splitlines()
    assert first.startswith("neunund")
    assert blank == ""
    assert last


def test_missing_input_is_reported(trained: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        lines.translate(options(trained, input=str(trained / "nothing")), Workdir(trained))
    with pytest.raises(UserError, match=r"text\.gz: cannot be read"):
        lines.translate(options(trained, input=str(trained / "text.gz")), Workdir(trained))


def test_compressed_input_is_translated_like_its_text(trained: Path, tmp_path: Path) -> None:
    text = b"twenty-one\n\ntwo"
    plain, packed, target = tmp_path / "in", tmp_path / "in.gz", tmp_path / "out"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    outputs = []
    for source in (plain, packed):
        lines.translate(options(trained, input=str(source), output=str(target)), Workdir(trained))
        outputs.append(target.read_bytes())
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") == 3


def test_damaged_compressed_input_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"twenty-one\n")[:-3])
    with pytest.raises(UserError, match=r"text\.gz: cannot be read \(the compressed file is truncated\)"):
        lines.check_files(tmp_path / "text.gz", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["text.gz"]
