"""Runs the commands and examples of the documents."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from branchnorm_jax.data import numerals
from experiments.reproduction import anchor
from tests.conftest import ROOT
from tests.importing.examples import m2m100, marian, t5

SMALLER = (
    "--config.model.encoder_layers=2 --config.model.decoder_layers=2 --config.model.width=16 "
    "--config.model.ffn_width=32 --config.model.heads=2 --config.data.vocab_size=300 --config.train.batch_tokens=1024 "
    "--config.train.warmup_steps=9 --config.train.learning_rate=5e-3 --config.train.checkpoint_every=5 "
    "--config.train.eval_bleu_sentences=2 --config.decode.max_length_a=0.5 --config.train.epochs=1"
)
"""Appended to the commands that train."""


def blocks(document: str) -> list[tuple[str, str]]:
    """Returns (language, text) of the code blocks of a document, in order."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return re.findall(r"^```(bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def smaller(block: str) -> str:
    """Returns the commands of a block, one per line, with smaller models."""
    commands = re.sub(r"\\\n\s*", "", block).strip()
    return re.sub(r"(?m)^python main\.py --config=.*$", lambda match: f"{match[0]} {SMALLER}", commands)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a folder that looks like a checkout, with the parallel text of a user."""
    for name in ("main.py", "configs", "branchnorm_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "text").mkdir()
    for split, count in (("train", 300), ("valid", 20), ("test", 20), ("more", 40)):
        for lang, lines in zip(
            ("en", "de"),
            zip(*numerals.pairs("train" if split == "more" else split, "en", "de", count), strict=True),
            strict=True,
        ):
            (tmp_path / "text" / f"{split}.{lang}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a document."""
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text(encoding="utf-8"))
    names = [anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in re.findall(r"(?m)^#+ (.*)$", text)]
    return {f"{name}-{count}" if (count := names[:place].count(name)) else name for place, name in enumerate(names)}


def test_links_lead_to_files_and_headings() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    known = {document.resolve(): anchors(document) for document in documents}
    broken = []
    for document in documents:
        text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", document.read_text(encoding="utf-8"))
        for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text):
            path, _, heading = link.partition("#")
            file = (document.parent / path).resolve() if path else document.resolve()
            if "://" not in link and (not file.exists() or (heading and heading not in known.get(file, ()))):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert len(known) > 10
    assert not broken


@pytest.mark.slow
def test_translation_guide_runs_from_text_files_to_a_server(checkout: Path) -> None:
    """Runs docs/translation.md from top to bottom."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    server: subprocess.Popen[bytes] | None = None
    try:
        for language, block in blocks("translation.md"):
            if language == "python":
                done = subprocess.run([sys.executable, "-c", block], cwd=checkout, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                continue
            commands = smaller(block)
            if "--mode=serve" in commands:
                server = subprocess.Popen(commands.split(), cwd=checkout, env=environment)
                wait_for("http://localhost:8000/health", server)
                continue
            if "curl" in commands and not shutil.which("curl"):
                continue
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=checkout,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{commands}\n{done.stderr}"
            if "curl" in commands:
                assert done.stdout.count('"score"') == 4
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    assert len((checkout / "test.hypothesis").read_text(encoding="utf-8").splitlines()) == 20
    for name in (
        "runs/mine/curves.png",
        "runs/mine/results.json",
        "runs/both/compare.html",
        "runs/many/status.json",
        "runs/tuned/status.json",
    ):
        assert (checkout / name).stat().st_size > 0, name
    for name in ("ctranslate2/model.bin", "ctranslate2-int8/model.bin", "huggingface/model.safetensors"):
        assert (checkout / "runs/mine/export" / name).stat().st_size > 0, name


@pytest.mark.slow
def test_recipes_distill_translate_back_and_rerank(checkout: Path) -> None:
    """Runs docs/recipes.md from top to bottom."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    printed = ""
    for _, block in blocks("recipes.md"):
        command = ["bash", "-euo", "pipefail", "-c", smaller(block)]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        printed += done.stderr
    distilled, back = checkout / "runs/distilled", checkout / "runs/back"
    for lang in ("en", "de"):
        assert len((distilled / f"train.{lang}").read_text().splitlines()) == 270
        assert len((back / f"train.back.{lang}").read_text().splitlines()) == 40
    for name in ("student", "both_kinds"):
        assert (checkout / "runs" / name / "results.json").exists()
    assert "train: 340 pairs read" in printed
    candidates = [line.split("\t")[0] for line in (checkout / "runs/candidates").read_text().splitlines()]
    chosen = (checkout / "runs/reranked.de").read_text().splitlines()
    assert len(chosen) == 20
    assert all(line in candidates[4 * number : 4 * number + 4] for number, line in enumerate(chosen))


@pytest.mark.slow
def test_hugging_face_guide_imports_fine_tunes_and_exports(checkout: Path) -> None:
    """Runs docs/from_huggingface.md from top to bottom."""
    marian(checkout / "opus-mt-en-de")
    m2m100(checkout / "nllb-200", nllb=True)
    t5(checkout / "t5-small")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    commands = "".join(block for _, block in blocks("from_huggingface.md"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("largest difference of a token's log-probability") == 7
    for name in (
        "runs/opus/import.json",
        "runs/nllb/import.json",
        "runs/mine/status.json",
        "runs/mine/export/huggingface/vocab.json",
        "runs/nllb_again/import.json",
    ):
        assert (checkout / name).stat().st_size > 0, name


@pytest.mark.slow
def test_python_examples_run(trained: Path, tmp_path: Path) -> None:
    """Runs docs/api.md from top to bottom. Each example has at most 15 lines."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(trained)
    examples = [block for language, block in blocks("api.md") if language == "python"]
    assert len(examples) == 3
    assert max(block.count("\n") for block in examples) <= 15
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "".join(examples)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shape, *lines = done.stdout.splitlines()
    assert shape == "(2, 3, 100)"
    losses = [float(line.split()[1]) for line in lines[:3]]
    assert losses == sorted(losses, reverse=True)
    # Two translations, the better one first.
    scores = [float(line.split()[0]) for line in lines[3:]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def wait_for(address: str, server: subprocess.Popen[bytes], seconds: float = 300) -> None:
    """Waits until this server answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address).read()
            assert server.poll() is None, "another server answers at this address"
            return
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"{address} does not answer"
            time.sleep(1)
