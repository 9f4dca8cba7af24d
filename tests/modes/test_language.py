"""Language models through the command line: train, resume, evaluate, generate, compare."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_metrics, read_status, run_main

TINY = (
    *("--config.model.width=16", "--config.model.ffn_width=24", "--config.model.heads=2", "--config.data.context=32"),
    *("--config.train.batch_tokens=512", "--config.train.steps=30", "--config.train.warmup_steps=5"),
    *("--config.train.learning_rate=1e-2", "--config.train.eval_every=15", "--config.train.checkpoint_every=15"),
    "--config.train.log_every=1",
)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A folder with three documents of each split."""
    for split, name in (("train", "depth"), ("valid", "recipes"), ("test", "api")):
        content = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for index, part in enumerate((content[:3000], content[3000:5000], content[5000:6000])):
            (tmp_path / f"{split}.{index}.txt").write_text(part, encoding="utf-8")
    return f"--config.data.path={tmp_path}"


@pytest.mark.slow
def test_language_models_from_training_to_comparison(text: str, tmp_path: Path) -> None:
    files, runs = "--config.data.files={split}.*.txt", (tmp_path / "a", tmp_path / "b")
    common = (text, files, *TINY)
    whole = run_main("--config=lm:2L", f"--workdir={runs[0]}", *common)
    assert whole.returncode == 0, whole.stderr
    assert "bits_per_byte" in whole.stderr and "source_gain" not in whole.stderr

    # A run that stopped after 15 updates goes on bit for bit.
    half = tmp_path / "half"
    for steps in (15, 30):
        decay = (f"--config.train.steps={steps}", "--config.train.decay_steps=30")
        resumed = run_main("--config=lm:2L", f"--workdir={half}", *common, *decay)
        assert resumed.returncode == 0, resumed.stderr
    assert read_metrics(half) == read_metrics(runs[0])
    assert read_status(half)["state_sha256"] == read_status(runs[0])["state_sha256"]

    word_pieces = ("--config.data.vocab_type=unigram", "--config.data.vocab_size=120", "--config.data.rows=packed")
    other = run_main("--config=lm:2L", f"--workdir={runs[1]}", *common, *word_pieces)
    assert other.returncode == 0, other.stderr

    for run in runs:
        evaluated = run_main("--mode=evaluate", f"--workdir={run}")
        assert evaluated.returncode == 0, evaluated.stderr
        results = json.loads((run / "results.json").read_text())["test"]
        assert 0 < results["bits_per_byte"]["score"] < 8
    compared = run_main(
        "--mode=compare", f"--workdir={tmp_path / 'both'}", f"--config.compare.systems=a={runs[0]},b={runs[1]}"
    )
    assert compared.returncode == 0, compared.stderr
    rows = json.loads((tmp_path / "both" / "compare.json").read_text())["systems"]
    for name, run in zip("ab", runs, strict=True):
        score = json.loads((run / "results.json").read_text())["test"]["bits_per_byte"]["score"]
        assert rows[name]["bits_per_byte"] == pytest.approx(score, rel=1e-5)

    (tmp_path / "file").write_text("x\n", encoding="utf-8")
    for systems, reference, reason in (
        (f"{runs[0]},{tmp_path / 'typo'}", "", "typo: neither a workdir nor a file"),
        (f"{runs[0]},{tmp_path / 'file'}", "", "file is no folder of a language model"),
        (f"{runs[0]},{runs[1]}", "x", "compare.reference is for translations"),
    ):
        refused = run_main(
            "--mode=compare",
            f"--workdir={tmp_path / 'none'}",
            f"--config.compare.systems={systems}",
            f"--config.compare.reference={reference}",
        )
        assert (refused.returncode, reason in refused.stderr) == (2, True)

    # Documents of one line each have the same losses as the lines alone.
    documents = [(tmp_path / f"test.{number}.txt").read_text().replace("\n", " ") for number in (0, 1)]
    (tmp_path / "lines").mkdir()
    for number, line in enumerate(documents):
        (tmp_path / "lines" / f"test.{number}.txt").write_text(line, encoding="utf-8")
    evaluated = run_main("--mode=evaluate", f"--workdir={runs[0]}", f"--config.data.path={tmp_path / 'lines'}")
    assert evaluated.returncode == 0, evaluated.stderr
    other_text = run_main(
        "--mode=compare", f"--workdir={tmp_path / 'none'}", f"--config.compare.systems={runs[0]},{runs[1]}"
    )
    assert (other_text.returncode, "see their signatures" in other_text.stderr) == (2, False)
    assert "evaluated on different texts" in other_text.stderr
    table = [line.split("\t") for line in (runs[0] / "evaluation" / "test.lines.tsv").read_text().splitlines()[1:]]
    stdin = f"{documents[0]}\n\n{documents[1]}\n"
    scored = run_main("--mode=score", f"--workdir={runs[0]}", stdin=stdin)
    assert scored.returncode == 0, scored.stderr
    first, blank, last = (line.split("\t") for line in scored.stdout.splitlines())
    assert float(blank[0]) < 0 and blank[1] == "1"  # EOS
    log_probs, tokens = zip(first, last, strict=True)
    assert [-float(value) for value in log_probs] == pytest.approx([float(row[4]) for row in table], rel=1e-5)
    assert list(tokens) == [row[3] for row in table]

    objects = run_main("--mode=score", f"--workdir={runs[0]}", "--config.decode.format=jsonl", stdin="A line.\n")
    (found,) = map(json.loads, objects.stdout.splitlines())
    assert (found["text"], found["tokens"]) == ("A line.", 8)

    prompts = "The \n\n"
    generated = run_main("--mode=generate", f"--workdir={runs[0]}", "--config.decode.format=jsonl", stdin=prompts)
    assert generated.returncode == 0, generated.stderr
    lines = [json.loads(line) for line in generated.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["The ", ""]
    assert all(line["tokens"] <= 31 for line in lines)  # data.context=32
    again = run_main("--mode=generate", f"--workdir={runs[0]}", "--config.decode.format=jsonl", stdin=prompts)
    assert again.stdout == generated.stdout

    # Several documents end within the rows that are compared.
    exported = run_main("--mode=export", f"--workdir={runs[0]}")
    assert exported.returncode == 0, exported.stderr
    assert "largest difference of a token's log-probability" in exported.stderr

    for mode in ("translate", "serve"):
        refused = run_main(f"--mode={mode}", f"--workdir={runs[0]}")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "needs a translation model" in refused.stderr
