"""JSON output has the values of the text output, and its alignments are places in its lists of pieces."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.data import numerals
from branchnorm_jax.data.tokenizer import Tokenizer, train_tokenizer
from branchnorm_jax.decoding.parts import Part
from branchnorm_jax.decoding.results import Translation, joined
from branchnorm_jax.modes.output import best_translation, json_line, plain_lines
from branchnorm_jax.options import DataConfig, DecodeConfig
from tests.conftest import run_main

SOURCES = ["twenty-one", "one hundred and five"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = numerals.pairs("train", "en", "de", 300)
    return train_tokenizer(DataConfig(vocab_size=300), text, tmp_path_factory.mktemp("v") / "v")


def translations(tokenizer: Tokenizer, parts: list[str]) -> list[Translation]:
    """Returns two translations of a line of these parts, with random attention."""
    rng = np.random.default_rng(0)
    sources = tokenizer.encode_source(parts)

    def one(ids: list[int], text: str, rank: int) -> Translation:
        pieces = tokenizer.target_pieces_of(ids)
        scores = rng.normal(size=len(ids)).tolist()
        attention = rng.random((len(ids), len(ids)), np.float32)
        score = -float(rank)
        return Translation(
            text, score, sum(scores), tuple(zip(pieces, scores, strict=True)), tuple(ids), tuple(ids), attention
        )

    each = [[one(ids, text, rank) for rank in (1, 2)] for ids, text in zip(sources, parts, strict=True)]
    return joined(each, [Part(ids) for ids in sources])


@pytest.mark.parametrize("parts", [SOURCES[:1], SOURCES])
def test_json_equals_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    found = translations(tokenizer, parts)
    config = DecodeConfig(nbest=2, token_scores=True, alignments=True)
    whole = json.loads(json_line("a \u2028 line", found, config, tokenizer))
    assert whole["source"] == "a \u2028 line"
    for fields, line in zip(whole["hypotheses"], plain_lines(7, found, config), strict=True):
        index, text, score, scores, alignment = line.split(" ||| ")
        assert (index, text, float(score)) == ("7", fields["translation"], fields["score"])
        assert scores.split() == [
            f"{piece}:{score:.4f}" for piece, score in zip(fields["pieces"], fields["token_scores"], strict=True)
        ]
        sources, targets = (np.array(fields[name]) for name in ("source_pieces", "pieces"))
        assert fields.get("parts", 1) == len(parts) == list(targets).count("</s>")
        # Without the ends of parts, places are the indices of the text output.
        places = [np.cumsum(side != "</s>") - 1 for side in (sources, targets)]
        assert alignment.split() == [f"{places[0][i]}-{places[1][j]}" for i, j in fields["alignments"]]
        assert "</s>" not in [targets[j] for _, j in fields["alignments"]]
    best = found[:1]
    for shown in (found, best):
        line = json_line("x", shown, dataclasses.replace(config, nbest=len(shown)), tokenizer)
        assert best_translation(line) == best[0].text
    plain = json.loads(json_line("x", best, DecodeConfig(), tokenizer))
    assert plain.keys() == {"source", "translation", "score", "log_prob"} | ({"parts"} if len(parts) > 1 else set())
    assert plain["translation"] == plain_lines(0, best, DecodeConfig())[0]


def test_missing_translations_and_warnings_are_valid_json(tokenizer: Tokenizer) -> None:
    missing = Translation("", -math.inf, -math.inf, warning="cut from 9 to 4 tokens")
    fields = json.loads(json_line("x", [missing], DecodeConfig(), tokenizer))
    expected = {"translation": "", "score": None, "log_prob": None, "warning": "cut from 9 to 4 tokens"}
    assert fields == {"source": "x"} | expected


@pytest.mark.slow
def test_modes_print_one_object_per_line(trained: Path, tmp_path: Path) -> None:
    """Also in a file that is continued, and for lines that are split."""
    lines = ["twenty-one", "", " ".join(["seven"] * 300)]
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"{line}\n" for line in lines))
    command = f"--workdir={trained}", "--config.decode.format=jsonl"
    options = f"--config.decode.input={source}", "--config.decode.nbest=2"
    done = run_main("--mode=translate", *command, *options, f"--config.decode.output={target}")
    assert done.returncode == 0, done.stderr
    assert "1 line of more than 128 tokens translated sentence by sentence" in done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [each["source"] for each in found] == lines
    assert [len(each["hypotheses"]) for each in found] == [2, 2, 2]
    assert [each["hypotheses"][0].get("parts", 1) > 1 for each in found] == [False, False, True]
    done = run_main("--mode=score", *command, stdin="one\teins\n")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert fields.keys() == {"source", "target", "log_prob", "tokens"}
    assert (fields["source"], fields["target"]) == ("one", "eins")
    assert fields["log_prob"] < 0 < fields["tokens"]
