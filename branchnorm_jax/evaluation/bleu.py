"""Corpus-level scores, each with a signature that says how it was computed.

| name                | input                                        | comparable with                              |
|---------------------|----------------------------------------------|----------------------------------------------|
| bleu                | raw text, tokenised by sacreBLEU             | sacreBLEU with the same signature            |
| chrf                | raw text, character n-grams                  | sacreBLEU chrF with the same signature       |
| ter                 | raw text, edits per word (lower is better)   | sacreBLEU TER with the same signature        |
| multi_bleu          | Moses tokens                                 | papers that report `multi-bleu.perl`         |
| compound_split_bleu | Moses tokens, hyphenated compounds split     | papers that report WMT14 English-German      |
"""

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable, Sequence

from sacrebleu.metrics import BLEU, CHRF, TER

from branchnorm_jax.codes import base
from branchnorm_jax.errors import UserError, count

# Moses does not segment these languages, so its "tokens" would be whole sentences.
UNSPACED = ("zh", "ja", "ko")

COMPOUND = re.compile(r"(\S)-(\S)")


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a test set in one metric.

    Attributes:
      name: the metric, as in the table of this module.
      score: value from 0 to 100.
      signature: the settings; scores are comparable only if their signatures are equal.
    """

    name: str
    score: float
    signature: str


Measure = Callable[[Sequence[str], Sequence[str], Sequence[str]], list[Score]]
"""(sources, hypotheses, references) -> scores."""


def scores(hypotheses: Sequence[str], references: Sequence[str], target_lang: str) -> list[Score]:
    """Computes all scores of detokenised, cased translations.

    Each translation has one reference.

    Args:
      hypotheses: translations.
      references: references in the same order.
      target_lang: language tag such as "de" or "pt-BR"; selects the tokenisers. "de" adds `compound_split_bleu`.

    Raises:
      UserError: if the numbers of lines differ or are 0, or if the segmenter of the language is not installed.
    """
    _check(hypotheses, references)
    hypothesis_tokens, reference_tokens = tokenize(hypotheses, target_lang), tokenize(references, target_lang)
    tokens = tokenizer_name(target_lang)
    results = [
        *(_score(name, metric, hypotheses, references) for name, metric in metrics(target_lang).items()),
        _multi_bleu("multi_bleu", hypothesis_tokens, reference_tokens, tokens),
    ]
    if base(target_lang) == "de":
        hypothesis_parts, reference_parts = compound_split(hypothesis_tokens), compound_split(reference_tokens)
        results.append(
            _multi_bleu("compound_split_bleu", hypothesis_parts, reference_parts, f"{tokens}+compound-split")
        )
    return results


def mean_of(each: Sequence[Sequence[Score]]) -> list[Score]:
    """Returns the mean of each metric that all test sets have."""
    tables = [{score.name: score.score for score in test_scores} for test_scores in each]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    signature = f"mean of {count(len(tables), 'language pair')}"
    return [Score(name, sum(table[name] for table in tables) / len(tables), signature) for name in names]


def metrics(target_lang: str) -> dict[str, BLEU | CHRF | TER]:
    """Returns sacreBLEU's metrics for raw text, by name. Lower TER is better."""
    unspaced = base(target_lang) in UNSPACED
    return {
        "bleu": sacrebleu_metric(target_lang),
        "chrf": CHRF(),
        "ter": TER(normalized=unspaced, asian_support=unspaced),
    }


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str], target_lang: str) -> dict[str, float]:
    """Computes only the scores "bleu" and "chrf", for validation.

    Raises the same errors as `scores`.
    """
    _check(hypotheses, references)
    chosen: dict[str, BLEU | CHRF] = {"bleu": sacrebleu_metric(target_lang), "chrf": CHRF()}
    return {name: _score(name, metric, hypotheses, references).score for name, metric in chosen.items()}


def sacrebleu_metric(target_lang: str) -> BLEU:
    """Returns cased sacreBLEU with its tokeniser for the language.

    The tokeniser is 13a, or a word segmenter for zh, ja and ko. Call it before a run, so that a missing segmenter is
    reported then and not at the first validation.

    Raises:
      UserError: if the segmenter, an optional package, is not installed.
    """
    try:
        return BLEU(trg_lang=base(target_lang))
    except (ImportError, RuntimeError) as error:  # sacreBLEU imports the segmenters of ja and ko lazily
        package = f"sacrebleu[{base(target_lang)}]"
        raise UserError(f"BLEU of {target_lang!r} needs a word segmenter: pip install '{package}'") from error


def tokenize(lines: Sequence[str], target_lang: str) -> list[str]:
    """Tokenises lines for multi-bleu; returns tokens separated by spaces.

    The tokens are those of Moses's `tokenizer.perl -l <lang>` (hyphens stay inside words) without its XML escapes.
    Escapes map tokens one to one and therefore do not change the score. Chinese, Japanese and Korean are segmented by
    sacreBLEU instead.
    """
    if base(target_lang) in UNSPACED:
        segmenter = sacrebleu_metric(target_lang).tokenizer
        return [segmenter(line) for line in lines]
    import sacremoses  # only here, because it takes 0.2 seconds

    moses = sacremoses.MosesTokenizer(lang=base(target_lang))
    return [moses.tokenize(line, return_str=True, escape=False) for line in lines]


def tokenizer_name(target_lang: str) -> str:
    """Returns the name of the tokeniser of this language, for signatures."""
    if base(target_lang) in UNSPACED:
        return str(sacrebleu_metric(target_lang).tokenizer.signature())
    return f"moses-{base(target_lang)}-sacremoses-{importlib.metadata.version('sacremoses')}"


def compound_split(lines: Sequence[str]) -> list[str]:
    """Replaces `a-b` by `a ##AT##-##AT## b` in tokenised lines.

    tensor2tensor and fairseq do this for WMT14 En-De. As in their Perl scripts, matches do not overlap: `x-y-z`, with a
    one-letter middle part, is split only at its first hyphen.
    """
    return [COMPOUND.sub(r"\1 ##AT##-##AT## \2", line) for line in lines]


def _score(name: str, metric: BLEU | CHRF | TER, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    score = metric.corpus_score(hypotheses, [references]).score
    return Score(name, score, str(metric.get_signature()))


def _multi_bleu(name: str, hypotheses: Sequence[str], references: Sequence[str], tokens: str) -> Score:
    """Computes the score of `multi-bleu.perl`.

    It uses white-space tokens, n-grams up to 4, no smoothing, and the brevity penalty exp(1 - ref/hyp).
    """
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    score = metric.corpus_score(hypotheses, [references]).score
    return Score(name, score, str(metric.get_signature()).replace("tok:none", f"tok:{tokens}"))


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references; "
            "each translation needs one reference"
        )
    if not hypotheses:
        raise UserError("cannot score an empty list of translations; the test set must have at least one line")
