"""Runs main.py and the server with a model for several languages."""

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
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("several") / "run"
    done = run_main(*PAIRS, f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert "300 of de-en (33.3%), 300 of fr-en (33.3%), 300 of en-de (33.3%)" in done.stderr
    return workdir


def test_each_pair_is_validated(multilingual: Path) -> None:
    (line,) = map(json.loads, (multilingual / "validation.jsonl").read_text().splitlines())
    assert set(line["pairs"]) == {"de-en", "fr-en", "en-de"}
    assert line["bleu"] == pytest.approx(sum(scores["bleu"] for scores in line["pairs"].values()) / 3)
    losses = [scores["loss"] for scores in line["pairs"].values()]
    assert min(losses) < line["loss"] < max(losses)
    assert read_status(multilingual)["status"] == "done"


def test_tags_select_the_target_language(multilingual: Path) -> None:
    text = ">>de<< twenty-one\ntwenty-one\n>>en<<one\none >>de<<\n"
    tagged = run_main("--mode=translate", f"--workdir={multilingual}", "--config.decode.target_lang=en", stdin=text)
    assert tagged.returncode == 0, tagged.stderr
    assert tagged.stderr.count("stdin, line 4: >>de<< is read as text, not as a language tag: only one") == 1
    german, _, _, _ = tagged.stdout.splitlines()
    (alone,) = run_main(
        "--mode=translate", f"--workdir={multilingual}", "--config.decode.target_lang=de", stdin="twenty-one\n"
    ).stdout.splitlines()
    assert german == alone
    assert ">>" not in tagged.stdout

    scores = run_main(
        "--mode=score", f"--workdir={multilingual}", stdin=">>de<< ten\tzehn\n>>en<< ten\tzehn\n"
    ).stdout.splitlines()
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "twenty-one\n",
            "stdin, line 1: no target language; set decode.target_lang or start the line with >>de<<, >>en<<",
        ),
        (
            ">>de<< one\n>>pl<< two\n",
            "stdin, line 2: this model was trained to translate to de, en, not to 'pl'",
        ),
    ],
)
def test_missing_and_unknown_target_languages_are_rejected(multilingual: Path, text: str, message: str) -> None:
    done = run_main("--mode=translate", f"--workdir={multilingual}", stdin=text)
    assert done.returncode == 2
    assert message in done.stderr


def test_evaluation_of_trained_and_untrained_pairs(multilingual: Path) -> None:
    options = "--mode=evaluate", f"--workdir={multilingual}", "--config.decode.max_length_b=2"
    done = run_main(*options, "--config.evaluate.pairs=en-de,fr-de")
    assert done.returncode == 0, done.stderr
    results = json.loads((multilingual / "results.json").read_text())
    each = [results[f"test.{pair}"]["chrf"]["score"] for pair in ("en-de", "fr-de")]
    assert results["test"]["chrf"]["score"] == pytest.approx(sum(each) / 2)
    assert len((multilingual / "evaluation" / "test.fr-de.hypothesis").read_text().splitlines()) == 500


def test_evaluation_rejects_languages_that_are_not_targets(multilingual: Path) -> None:
    done = run_main("--mode=evaluate", f"--workdir={multilingual}", "--config.evaluate.pairs=en-fr")
    assert done.returncode == 2
    assert "not trained to translate to 'fr'" in done.stderr


def test_server_selects_the_language_by_field_or_tag(multilingual: Path) -> None:
    """Both give the same translation. Alignments omit the tag."""
    options = ("--config.serve.port=0", "--config.serve.warm_up_length=0", "--config.decode.no_repeat_ngram=1")
    server = Server(f"--workdir={multilingual}", *options, "--config.decode.beam_size=2")
    try:
        health = ask(server.url + "/health")[2]
        assert (health["source_langs"], health["target_langs"]) == (["de", "en", "fr"], ["de", "en"])
        ((by_field,),) = translations(server.url, text="twenty-one", target_lang="de", alignments=True)
        ((by_tag,),) = translations(server.url, text=">>de<< twenty-one", alignments=True)
        ((other,),) = translations(server.url, text="twenty-one", target_lang="en", alignments=True)
        assert by_field == by_tag != other
        assert "warnings" not in by_tag
        ((inside,),) = translations(server.url, text="twenty-one >>de<<", target_lang="en")
        assert [each[:51] for each in inside["warnings"]] == [">>de<< is read as text, not as a language tag: only"]
        assert not any(piece.startswith(">>") for piece in by_tag["source_pieces"] + by_tag["pieces"])
        assert len(by_tag["alignment"][0]) == len(by_tag["source_pieces"])
        for request in ({"text": "one"}, {"text": "one", "target_lang": "fr"}, {"text": "one", "target_lang": 3}):
            assert ask(server.url + "/translate", json.dumps(request).encode())[0] == 400
    finally:
        server.end()


def test_exported_models_read_tags(multilingual: Path) -> None:
    """The Hugging Face tokenizer encodes the tag as ours does. The export itself compares the log-probabilities."""
    transformers = pytest.importorskip("transformers")
    for format in ("huggingface", "ctranslate2"):
        done = run_main("--mode=export", f"--workdir={multilingual}", f"--config.export.format={format}")
        assert done.returncode == 0, done.stderr
        assert "largest difference of a token's log-probability over 102 validation pairs" in done.stderr
        assert "a source begins with the tag of the target language, such as >>de<<" in done.stderr
    theirs = transformers.MarianTokenizer.from_pretrained(multilingual / "export" / "huggingface")
    ours = load_tokenizer(multilingual / "vocabulary")
    tag = ours.source_pieces.index(">>de<<")
    assert theirs(">>de<< twenty-one")["input_ids"] == [tag, *ours.encode_source(["twenty-one"])[0]]


def test_exported_models_begin_with_the_target_tag(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained = run_main(*PAIRS, "--config.data.tags=target", f"--workdir={tmp_path / 'run'}")
    assert trained.returncode == 0, trained.stderr
    options = ("--config.export.format=huggingface", "--config.export.check_lines=0")
    for language, message in (("", "or set decode.target_lang"), ("de", "generate puts >>de<< there")):
        folder = tmp_path / f"exported{language}"
        done = run_main(
            "--mode=export",
            f"--workdir={tmp_path / 'run'}",
            *options,
            f"--config.export.path={folder}",
            f"--config.decode.target_lang={language}",
        )
        assert done.returncode == 0, done.stderr
        assert message in done.stderr
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tags = tokenizer.convert_tokens_to_ids([">>de<<", ">>en<<"])
        assert model.generation_config.forced_bos_token_id == (tags[0] if language else None)
        for tag in tags if language else tags[1:]:
            options_of_tag = {} if tag == tags[0] else {"forced_bos_token_id": tag}
            found = model.generate(**tokenizer("ten", return_tensors="pt"), max_new_tokens=4, **options_of_tag)
            assert found[0, 1] == tag
