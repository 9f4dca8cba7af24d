"""Modes of language models: --mode=generate, and evaluate and export for them."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.documents import divided
from branchnorm_jax.data.texts import build_text
from branchnorm_jax.decoding.generate import Generator
from branchnorm_jax.decoding.text import Windows, token_nll, windows
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.evaluation.evaluate import earlier_results, format_table, scoring_options, write_results
from branchnorm_jax.evaluation.text import scores, write_lines
from branchnorm_jax.export import fold, opt
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.modes.common import agree, compared, opened, read_chunks
from branchnorm_jax.modes.output import to_json
from branchnorm_jax.options import Config
from branchnorm_jax.parallel import hosts
from branchnorm_jax.training import logs
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.trained import restore
from branchnorm_jax.workdir import Workdir

PROMPTS = 64
"""Number of prompts that are continued at once."""


def evaluate_text(config: Config, workdir: Workdir) -> None:
    """Computes bits per byte and perplexity of the splits of `evaluate.splits`.

    Writes results.json and, for each split, evaluation/<split>.lines.tsv with the loss of every line.
    """
    context, stride = config.data.context, config.evaluate.stride_in(config.data.context)
    tokenizer, model, params, alpha, step = restore(config, workdir)
    models = [checksums((params, alpha)).tolist()]
    agree(config, step=step, models=models)
    logs.say(f"evaluating the checkpoint of step {step} (decode.checkpoint={config.decode.checkpoint})")
    directory, results = workdir / "evaluation", dict[str, list[Score]]()
    run = {"step": step, "models": models, **scoring_options(config)}
    say_removed(workdir / "results.json", run)
    for split in config.evaluate.split_names:
        text = build_text(config.data, tokenizer, split, workdir / "corpus")
        agree(config, **{f"the text of {split}": text.fingerprint})
        for line in filter(None, (divided(config.data, split), text.describe(split))):
            logs.say(line)
        chosen = windows(text.starts, context, stride)
        with logs.progress_bar(len(chosen.begin), 0, "window", split) as bar:
            batch_tokens = config.decode.batch_tokens
            nll = token_nll(model, params, alpha, text.tokens, chosen, config.data, batch_tokens, bar.update)
        results[split] = scores(nll, text, context, stride, config.data.rows)
        if hosts.is_first():
            directory.mkdir(exist_ok=True)
            write_lines(directory / f"{split}.lines.tsv", nll, text)
            write_results(workdir / "results.json", results, directory, run)
    if hosts.is_first():
        print(format_table(results))


def say_removed(path: Path, run: dict[str, Any]) -> None:
    """Says which scores in results.json this evaluation will remove; see `earlier_results`."""
    _, removed = earlier_results(path, run)
    if removed:
        logs.say(removed)


def generate(config: Config, workdir: Workdir) -> None:
    """Continues each line of stdin, or of `decode.input`.

    Prints the prompt and its continuation as text, or one JSON object per continuation (`decode.format=jsonl`).
    """
    if config.model.family != "decoder":
        raise UserError("--mode=generate needs a language model (configs/lm.py); translate with --mode=translate")
    workdir.check_config(config)
    tokenizer, model, params, alpha, _ = restore(config, workdir)
    generator, done, said = Generator(model, tokenizer, config.decode, config.data.context), 0, False
    with opened(config.decode.input) as (stream, name):
        for lines in read_chunks(stream, name, PROMPTS):
            long = next((number for number, line in enumerate(lines, start=done + 1) if generator.cut(line)), 0)
            if long and not said:
                logs.say(
                    f"{name}, line {long}: only the last {generator.room} tokens of this prompt are read, half of "
                    f"data.context={config.data.context}; other long lines are not reported"
                )
                said = True
            found = generator.generate(params, alpha, lines, done)
            for prompt, continuations in zip(lines, found, strict=True):
                for each in continuations:
                    values: dict[str, Any] = {"prompt": prompt, "text": each.text, "log_prob": round(each.log_prob, 6)}
                    values |= {"tokens": len(each.tokens), "ended": each.ended}
                    as_json = config.decode.format == "jsonl"
                    print(to_json(values) if as_json else f"{prompt}{each.text}\n")
            sys.stdout.flush()
            done += len(lines)


def export_text(config: Config, workdir: Workdir, folder: Path) -> None:
    """Writes a language model for Hugging Face's `OPTForCausalLM`, and compares the log-probabilities.

    The comparison uses the first `export.check_lines` rows of the validation text.

    Raises:
      UserError: if OPT cannot represent the model.
      MismatchError: if a token's log-probability differs by more than `TOLERANCE`.
    """
    tokenizer, model, params, alpha, step = restore(config, workdir)
    if reason := fold.obstacle(model):
        raise UserError(f"export: {config.model.method} is not a plain Transformer: {reason}")
    plain = fold.fold(model, params, alpha)
    if reason := opt.obstacle(plain, config.model):
        raise UserError(f"export: OPTForCausalLM cannot represent this model: {reason}")
    context, in_bytes = config.data.context, config.data.vocab_type == "bytes"
    exact = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="float32", carry_dtype="float32"))
    with atomic_directory(folder) as temporary:
        opt.write(plain, config.model, config.decode, temporary, context, in_bytes)
        if not in_bytes:
            (temporary / "vocab.spm").write_bytes(tokenizer.models[1])
        if config.export.check_lines:
            text = build_text(config.data, tokenizer, "valid", workdir / "corpus")
            rows = windows(text.starts, context, context)
            rows = Windows(*(values[: config.export.check_lines] for values in rows))
            texts = [text.tokens[begin : end + 1] for begin, end in zip(rows.begin, rows.end, strict=True)]

            as_it_is = dataclasses.replace(config.data, rows="stream")  # OPT reads the first token of each row.

            def ours() -> list[np.ndarray]:
                nll = token_nll(exact, params, alpha, text.tokens, rows, as_it_is, config.decode.batch_tokens)
                return [-nll[first:end] for first, end in zip(rows.first, rows.end, strict=True)]

            def theirs() -> list[np.ndarray]:
                # The last window of a document overlaps the one before, which predicted its first tokens.
                found = zip(opt.log_probs(temporary, texts), rows.first - rows.begin, strict=True)
                return [values[start:] for values, start in found]

            what = f"{len(texts)} rows of the validation text"
            compared(ours, theirs, what, "exported")
    tokenizer_files = "AutoTokenizer loads its tokenizer" if in_bytes else "read vocab.spm with SentencePiece"
    logs.say(f"wrote {folder}, step {step}; {tokenizer_files}; a text begins with </s>")
    print(folder)
