"""Many languages in one model, as a user has them."""

import json
from pathlib import Path

import pytest

from branchnorm_jax.data.tokenizer import load_tokenizer
from tests.conftest import HASTY, read_status, run_main
from tests.modes.test_serve import Server, ask, translations

pytestmark = pytest.mark.slow

PAIRS = (
    *HASTY,
    "--config.data.pairs=en+de+fr-en,en-de",
    "--config.data.numerals_pairs=300",
    "--config.train.steps=20",
    "--config.train.eval_every=20",
    "--config.train.eval_bleu_sentences=2",
)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("several") / "run"
    done = run_main(*PAIRS, f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert "300 of de-en, 300 of fr-en, 300 of en-de" in done.stderr
    return workdir


def test_each_pair_is_validated(several: Path) -> None:
    (line,) = map(json.loads, (several / "validation.jsonl").read_text().splitlines())
    assert set(line["pairs"]) == {"de-en", "fr-en", "en-de"}
    assert line["bleu"] == pytest.approx(sum(found["bleu"] for found in line["pairs"].values()) / 3)
    losses = [found["loss"] for found in line["pairs"].values()]
    assert min(losses) < line["loss"] < max(losses)
    assert read_status(several)["status"] == "done"


def test_lines_say_which_language_they_want(several: Path) -> None:
    text = ">>de<< twenty-one\ntwenty-one\n>>en<<one\n"
    wanted = run_main("--mode=translate", f"--workdir={several}", "--config.decode.target_lang=en", stdin=text)
    assert wanted.returncode == 0, wanted.stderr
    german, _, _ = wanted.stdout.splitlines()
    (alone,) = run_main(
        "--mode=translate", f"--workdir={several}", "--config.decode.target_lang=de", stdin="twenty-one\n"
    ).stdout.splitlines()
    assert german == alone
    assert ">>" not in wanted.stdout

    scores = run_main(
        "--mode=score", f"--workdir={several}", stdin=">>de<< ten\tzehn\n>>en<< ten\tzehn\n"
    ).stdout.splitlines()
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("twenty-one\n", "line 1: no target language; set target_lang or start the line with >>de<<, >>en<<"),
        (
            ">>de<< one\n>>pl<< two\n",
            "line 2: this model was trained to translate to de, en, not to 'pl'",
        ),
    ],
)
def test_no_language_and_an_unknown_one(several: Path, text: str, told: str) -> None:
    done = run_main("--mode=translate", f"--workdir={several}", stdin=text)
    assert done.returncode == 2
    assert told in done.stderr


def test_evaluation_of_each_pair_and_of_one_never_trained(several: Path) -> None:
    options = "--mode=evaluate", f"--workdir={several}", "--config.decode.max_length_b=2"
    done = run_main(*options, "--config.evaluate.pairs=en-de,fr-de")
    assert done.returncode == 0, done.stderr
    results = json.loads((several / "results.json").read_text())
    each = [results[f"test.{pair}"]["chrf"]["score"] for pair in ("en-de", "fr-de")]
    assert results["test"]["chrf"]["score"] == pytest.approx(sum(each) / 2)
    assert len((several / "evaluation" / "test.fr-de.hypothesis").read_text().splitlines()) == 500


def test_a_language_that_is_no_target_cannot_be_evaluated(several: Path) -> None:
    done = run_main("--mode=evaluate", f"--workdir={several}", "--config.evaluate.pairs=en-fr")
    assert done.returncode == 2
    assert "not trained to translate to 'fr'" in done.stderr


def test_a_server_of_several_languages(several: Path) -> None:
    """A field or a tag says which; alignments are those of the text without its tag."""
    options = ("--config.serve.port=0", "--config.serve.warm_up_length=0", "--config.decode.no_repeat_ngram=1")
    server = Server(f"--workdir={several}", *options, "--config.decode.beam_size=2")
    try:
        health = ask(server.url + "/health")[2]
        assert (health["source_langs"], health["target_langs"]) == (["de", "en", "fr"], ["de", "en"])
        ((by_field,),) = translations(server.url, text="twenty-one", target_lang="de", alignments=True)
        ((by_tag,),) = translations(server.url, text=">>de<< twenty-one", alignments=True)
        ((other,),) = translations(server.url, text="twenty-one", target_lang="en", alignments=True)
        assert by_field == by_tag != other
        assert not any(piece.startswith(">>") for piece in by_tag["source_pieces"] + by_tag["pieces"])
        assert len(by_tag["alignment"][0]) == len(by_tag["source_pieces"])
        for request in ({"text": "one"}, {"text": "one", "target_lang": "fr"}, {"text": "one", "target_lang": 3}):
            assert ask(server.url + "/translate", json.dumps(request).encode())[0] == 400
    finally:
        server.end()


def test_exported_with_its_tags(several: Path) -> None:
    """Hugging Face's tokenizer reads the tag as we do; the export itself compares both engines over all pairs."""
    transformers = pytest.importorskip("transformers")
    for format in ("huggingface", "ctranslate2"):
        done = run_main("--mode=export", f"--workdir={several}", f"--config.export.format={format}")
        assert done.returncode == 0, done.stderr
        assert "largest difference of a token's log-probability over 102 validation pairs" in done.stderr
    theirs = transformers.MarianTokenizer.from_pretrained(several / "export" / "huggingface")
    ours = load_tokenizer(several / "vocabulary")
    tag = ours.source_pieces.index(">>de<<")
    assert theirs(">>de<< twenty-one")["input_ids"] == [tag, *ours.encode_source(["twenty-one"])[0]]
