"""Modes of language models: --mode=generate, and --mode=evaluate for texts."""

import json
import sys

from branchnorm_jax.data.texts import build_text
from branchnorm_jax.decoding.generate import Generator
from branchnorm_jax.decoding.text import token_nll, windows
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.evaluation.evaluate import format_table, write_results
from branchnorm_jax.evaluation.text import scores, write_lines
from branchnorm_jax.modes.common import read_chunks
from branchnorm_jax.modes.lines import opened
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir

PROMPTS = 64
"""Number of prompts that are continued at once."""


def evaluate_text(config: Config, workdir: Workdir) -> None:
    """Computes bits per byte and perplexity of the splits of `evaluate.splits`.

    Writes results.json and, for each split, evaluation/<split>.lines.tsv with the loss of every line.
    """
    context = config.data.context
    stride = config.evaluate.stride or max(1, context // 2)
    if stride > context:
        raise UserError(f"config: evaluate.stride={stride} is more than data.context={context}")
    tokenizer, model = network(config, workdir)
    params, alpha, step = restore_model(config, workdir, model, config.decode.checkpoint)
    logs.say(f"evaluating the checkpoint of step {step} (decode.checkpoint={config.decode.checkpoint})")
    directory, results = workdir / "evaluation", dict[str, list[Score]]()
    run = {"step": step, "models": [checksums((params, alpha)).tolist()], "checkpoint": config.decode.checkpoint}
    for split in config.evaluate.split_names:
        text = build_text(config.data, tokenizer, split, workdir / "corpus")
        logs.say(text.describe(split))
        chosen = windows(text.starts, context, stride)
        with logs.progress_bar(len(chosen.begin), 0, "window", split) as bar:
            nll = token_nll(model, params, alpha, text, chosen, config.decode.batch_tokens, bar.update)
        results[split] = scores(nll, text, context, stride)
        directory.mkdir(exist_ok=True)
        write_lines(directory / f"{split}.lines.tsv", nll, text)
        write_results(workdir / "results.json", results, directory, run)
    print(format_table(results))


def generate(config: Config, workdir: Workdir) -> None:
    """Continues each line of stdin, or of `decode.input`.

    Prints the prompt and its continuation as text, or one JSON object per continuation (`decode.format=jsonl`).
    """
    if config.model.family != "decoder":
        raise UserError("--mode=generate needs a language model (configs/lm.py); translate with --mode=translate")
    tokenizer, model = network(config, workdir)
    params, alpha, _ = restore_model(config, workdir, model, config.decode.checkpoint)
    generator, done = Generator(model, tokenizer, config.decode, config.data.context), 0
    with opened(config.decode.input) as (stream, name):
        for lines in read_chunks(stream, name, PROMPTS):
            found = generator.generate(params, alpha, lines, done)
            for prompt, continuations in zip(lines, found, strict=True):
                for each in continuations:
                    values = {"prompt": prompt, "text": each.text, "log_prob": round(each.log_prob, 6)}
                    values["tokens"] = len(each.tokens)
                    as_json = config.decode.format == "jsonl"
                    print(json.dumps(values, ensure_ascii=False) if as_json else f"{prompt}{each.text}\n")
            sys.stdout.flush()
            done += len(lines)
