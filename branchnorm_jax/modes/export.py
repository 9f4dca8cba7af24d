"""--mode=export: writes the model in the format of another engine."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from branchnorm_jax.bucket import is_url
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.export import ctranslate2, fold, huggingface
from branchnorm_jax.export.tokenizers import Vocabulary
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.modes.common import TOLERANCE, Sentences, Trained, compared, load, random_sentences
from branchnorm_jax.modes.language import export_text
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir


def export(config: Config, workdir: Workdir) -> None:
    """Writes the model in the format of another engine, and compares log-probabilities with that engine.

    There is no comparison if the engine is not installed, or if `export.check_lines` is 0.

    Raises:
      UserError: if the engine does not support the method, or an option does not fit.
      MismatchError: if a token's log-probability differs by more than `TOLERANCE`, unless the weights are quantised.
    """
    workdir.check_config(config)
    e = config.export
    if config.model.family == "decoder" and e.format != "huggingface":
        raise UserError("config: a language model is exported to Hugging Face: set export.format=huggingface")
    if is_url(e.path):
        raise UserError(f"export.path={e.path}: this must be a folder; a workdir in a bucket exports into the bucket")
    folder = Path(e.path).absolute() if e.path else workdir / "export" / e.name
    if config.decode.ensemble:
        raise UserError("config: an ensemble cannot be exported; leave decode.ensemble empty")
    if e.format == "huggingface" and e.quantization:
        raise UserError("config: export.quantization needs export.format=ctranslate2")
    if e.path and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"export.path={folder}: it exists and is not an empty folder; choose a new folder")
    if not e.path:
        workdir.fetch(f"export/{e.name}")  # In a bucket, the files of an earlier export would otherwise remain.
    if config.model.family == "decoder":
        return export_text(config, workdir, folder)
    trained = load(config, workdir)
    model, tokenizer = trained.translator.model, trained.translator.tokenizer
    if config.decode.length_penalty_kind != "fairseq":
        logs.say("other engines divide scores by L^p: set their length penalty accordingly")
    if config.decode.temperature:
        logs.say("decode.temperature is not exported: to sample in the other engine, set its own options")
    if e.format == "ctranslate2" and (config.decode.no_repeat_ngram or config.decode.min_length > 1):
        logs.say(
            "with decode.no_repeat_ngram and decode.min_length, CTranslate2 computes probabilities among the tokens "
            "that they allow, so its scores and some translations differ"
        )
    Languages(config.data, tokenizer).check(config.decode.source_lang, config.decode.target_lang)
    tags = _first_tags(config, tokenizer)
    begins = tags[0] if len(tags) == 1 else ""
    for line in _about_tags(config, tags):
        logs.say(line)
    check_exportable(config, trained)
    plain = fold.fold(model, trained.params, trained.alpha)
    most = config.decode.max_input_length
    longest = max(most, trained.translator.engine.limit(most) + 1)
    longest = min(longest, config.model.longest or longest)
    vocabularies = tokenizer.source_pieces, tokenizer.target_pieces
    with atomic_directory(folder) as temporary:
        if e.format == "ctranslate2":
            for name, content in tokenizer.exported.items():
                (temporary / name).write_bytes(content)
            ctranslate2.write(plain, config.model, vocabularies, temporary, longest, e.quantization)
            settings = ctranslate2.search_settings(config.decode, longest)
            (temporary / "translate.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            tokens = np.array(vocabularies[0]), np.array(vocabularies[1])
        else:
            languages = *_languages(config), begins, config.data.tags, config.data.pairs
            vocabulary = Vocabulary(*vocabularies, tokenizer.models, model.tags, *languages)
            tokens = huggingface.write(plain, config.model, config.decode, vocabulary, temporary, longest)
        if e.check_lines:
            check_export(config, trained, temporary, longest, tokens)
    if tokenizer.has_codes:
        processors = tokenizer.source_processor, tokenizer.target_processor
        logs.say(f"text for the codes is split by {processors[0]} and {processors[1]}")
    logs.say(f"wrote {folder}, step {trained.step}")
    print(folder)


def check_exportable(config: Config, trained: Trained) -> None:
    """Raises `UserError` if the format cannot represent the model or its vocabulary."""
    model, to_huggingface = trained.translator.model, config.export.format == "huggingface"
    if reason := fold.obstacle(model):
        raise UserError(f"export: {config.model.method} is not a plain Transformer: {reason}")
    if not to_huggingface and (reason := ctranslate2.obstacle(config.model)):
        raise UserError(f"export: the writer of CTranslate2's format cannot represent this model: {reason}")
    if to_huggingface and trained.translator.tokenizer.has_codes:
        raise UserError(
            "export: no tokenizer of Hugging Face splits text exactly as the codes of this model do; set "
            "export.format=ctranslate2, which writes the codes beside the model"
        )


def _languages(config: Config) -> tuple[str, str]:
    """Returns the languages that an exported model translates from and to; empty if the user has to choose them."""
    first, *others = config.data.directions()
    given = ("", "") if others and config.data.tags == "each" else (first.source_lang, first.target_lang)
    return config.decode.source_lang or given[0], config.decode.target_lang or given[1]


def _first_tags(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Returns the language tags that translations begin with, one of them each; [] if they begin with text."""
    data, chosen = config.data, config.decode.target_lang
    tags = (tokenizer.tags(data, data.sources[0], target) for target in ([chosen] if chosen else data.targets))
    return [tokenizer.target_pieces[tag] for each in tags for tag in each.target]


def _about_tags(config: Config, tags: list[str]) -> Iterator[str]:
    """Yields what to say about language tags: that a source begins with one, and how to pass those of `_first_tags`."""
    data = config.data
    if data.pairs and data.tags in ("source", "both", "each"):
        own = data.tags == "each"
        whose, langs = ("its own language", data.sources) if own else ("the target language", data.targets)
        yield f"a source begins with the tag of {whose}, such as >>{langs[0]}<<"
    if tags:
        only = tags[0] if len(tags) == 1 else ""
        passed = f"pass {only or 'it'} to CTranslate2 as target_prefix"
        if config.export.format == "huggingface":
            passed = "pass its id to generate as forced_bos_token_id, or set decode.target_lang"
            passed = f"generate puts {only} there, unless forced_bos_token_id is another one" if only else passed
        yield f"translations begin with a language tag: {passed}"


def check_export(
    config: Config, trained: Trained, folder: Path, longest: int, tokens: tuple[np.ndarray, np.ndarray]
) -> None:
    """Compares log-probabilities in our model and in the exported model; both force-decode the targets in float32.

    The sentences are the first validation pairs, or random ones if the run has no text, as an imported model.

    Args:
      config: options of the run.
      trained: our model.
      folder: the exported model.
      longest: maximum sequence length of the exported model.
      tokens: the engine's names of our source and target tokens: pieces in CTranslate2, ids in Hugging Face.

    Raises:
      UserError: if no pair fits into `longest` tokens.
      MismatchError: see `export`.
    """
    e, tokenizer, model = config.export, trained.translator.tokenizer, trained.translator.model
    exact = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="float32", carry_dtype="float32"))
    translator = Translator(exact, tokenizer, config.decode)
    if config.data.source == "text" and not config.data.path:
        (sources, targets), what = (
            random_sentences(model, e.check_lines, longest=longest),
            f"{e.check_lines} random sentences",
        )
    else:
        sources, targets = validation_sentences(config, translator, longest)
        what = f"{len(sources)} validation pairs"
    # Each engine gives the unused tokens a different, very small probability.
    used = ~np.isin(np.concatenate(targets), model.unused)

    def ours() -> list[np.ndarray]:
        log_probs = translator.token_log_probs(trained.params, trained.alpha, sources, targets)
        return [np.concatenate(log_probs)[used]]

    def theirs() -> list[np.ndarray]:
        given = [
            [side[line].tolist() for line in lines] for side, lines in zip(tokens, (sources, targets), strict=True)
        ]
        if e.format == "huggingface":
            log_probs = huggingface.log_probs(folder, *given)
        else:
            log_probs = ctranslate2.log_probs(folder, *([line[:-1] for line in lines] for lines in given))
        return [np.concatenate(log_probs)[used]]

    compared(ours, theirs, what, "exported", math.inf if e.quantization else TOLERANCE)


def validation_sentences(config: Config, translator: Translator, longest: int) -> tuple[Sentences, Sentences]:
    """Returns the first validation pairs as token ids, except pairs with a side of more than `longest` tokens.

    Raises `UserError` if no pair fits.
    """
    e, tokenizer = config.export, translator.tokenizer
    validated = config.data.validated()
    each = -(-e.check_lines // len(validated))
    pairs = [(d, pair) for d in validated for pair in itertools.islice(read_pairs(d, "valid"), each)]
    tags = [tokenizer.tags(config.data, d.source_lang, d.target_lang) for d, _ in pairs]
    encoded = zip(*translator.encode([pair for _, pair in pairs], tags), strict=True)
    fitting = [sides for sides in encoded if max(map(len, sides)) <= longest]
    if not fitting:
        raise UserError(
            f"export: none of the first {len(pairs)} validation pairs fits into the {longest} positions of the "
            "exported model; set a larger decode.max_input_length, or export.check_lines=0 to skip the check"
        )
    if len(fitting) < len(pairs):
        logs.say(
            f"the check skips {len(pairs) - len(fitting)} of {len(pairs)} validation pairs with a side longer than the "
            f"exported model's maximum, {longest} tokens (decode.max_input_length)"
        )
    sources, targets = zip(*fitting, strict=True)
    return [list(ids) for ids in sources], [list(ids) for ids in targets]
