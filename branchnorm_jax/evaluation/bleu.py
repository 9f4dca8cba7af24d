"""Scores of a corpus of translations, each with the signature that says how it was computed.

| name                | text                                         | comparable with                              |
|---------------------|----------------------------------------------|----------------------------------------------|
| bleu                | as it is; sacreBLEU tokenises it             | any sacreBLEU of the same signature          |
| chrf                | as it is; character n-grams                  | any sacreBLEU chrF of the same signature     |
| ter                 | as it is; edits per word, less is better     | any sacreBLEU TER of the same signature      |
| multi_bleu          | Moses tokens                                 | papers that report `multi-bleu.perl`         |
| compound_split_bleu | Moses tokens, hyphened compounds split       | papers that report WMT14 English-German      |
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import sacremoses
from sacrebleu.metrics import BLEU, CHRF, TER

from branchnorm_jax.errors import UserError

# Moses leaves these languages unsegmented, and n-grams of whole sentences measure nothing.
UNSPACED = ("zh", "ja", "ko")

COMPOUND = re.compile(r"(\S)-(\S)")


@dataclasses.dataclass(frozen=True)
class Score:
    """One number of a test set.

    Attributes:
      name: the metric, as in the table of this module.
      score: 0 to 100.
      signature: everything that must agree before two scores are compared.
    """

    name: str
    score: float
    signature: str


Measure = Callable[[Sequence[str], Sequence[str], Sequence[str]], list[Score]]
"""Scores of sources, hypotheses and references."""


def scores(hypotheses: Sequence[str], references: Sequence[str], target_lang: str) -> list[Score]:
    """Every score of detokenised, cased translations against one reference each.

    Args:
      hypotheses: one translation per line.
      references: one reference per line, in the same order.
      target_lang: language tag such as "de" or "pt-BR"; chooses the tokenisers, and "de" adds the compound split.

    Raises:
      UserError: unequal counts, no lines, or a language whose segmenter is not installed.
    """
    _check(hypotheses, references)
    hypothesis_tokens, reference_tokens = tokenize(hypotheses, target_lang), tokenize(references, target_lang)
    tokens = tokenizer_name(target_lang)
    found = [
        *(_score(name, metric, hypotheses, references) for name, metric in metrics(target_lang).items()),
        _multi_bleu("multi_bleu", hypothesis_tokens, reference_tokens, tokens),
    ]
    if _language(target_lang) == "de":
        hypothesis_parts, reference_parts = compound_split(hypothesis_tokens), compound_split(reference_tokens)
        found.append(_multi_bleu("compound_split_bleu", hypothesis_parts, reference_parts, f"{tokens}+compound-split"))
    return found


def mean_of(each: Sequence[Sequence[Score]]) -> list[Score]:
    """The mean of each metric that all test sets have."""
    tables = [{score.name: score.score for score in found} for found in each]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    signature = f"mean of {len(tables)} pairs of languages"
    return [Score(name, sum(table[name] for table in tables) / len(tables), signature) for name in names]


def metrics(target_lang: str) -> dict[str, BLEU | CHRF | TER]:
    """sacreBLEU's metrics of text as it is, by name; TER is better where it is lower."""
    unspaced = _language(target_lang) in UNSPACED
    return {
        "bleu": sacrebleu_metric(target_lang),
        "chrf": CHRF(),
        "ter": TER(normalized=unspaced, asian_support=unspaced),
    }


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], target_lang: str) -> float:
    """The score "bleu" of `scores` alone, for validation. Raises `UserError` as `scores` does."""
    _check(hypotheses, references)
    return _score("bleu", sacrebleu_metric(target_lang), hypotheses, references).score


def sacrebleu_metric(target_lang: str) -> BLEU:
    """Cased sacreBLEU with its tokeniser for the language: 13a, or the segmenter of zh, ja, ko.

    Raises:
      UserError: the segmenter is an optional package that is missing. Ask before a run, not at its first validation.
    """
    try:
        return BLEU(trg_lang=_language(target_lang))
    except (ImportError, RuntimeError) as error:  # sacreBLEU imports the segmenters of ja and ko only when asked
        package = f"sacrebleu[{_language(target_lang)}]"
        raise UserError(f"BLEU of {target_lang!r} needs a word segmenter: pip install '{package}'") from error


def tokenize(lines: Sequence[str], target_lang: str) -> list[str]:
    """Tokens separated by spaces, for multi-bleu.

    The tokens of Moses's `tokenizer.perl -l <lang>` (hyphens kept inside words) without its XML escapes, which rename
    tokens one to one and so change no score. Chinese, Japanese and Korean get sacreBLEU's segmenter instead.
    """
    if _language(target_lang) in UNSPACED:
        segmenter = sacrebleu_metric(target_lang).tokenizer
        return [segmenter(line) for line in lines]
    moses = sacremoses.MosesTokenizer(lang=_language(target_lang))
    return [moses.tokenize(line, return_str=True, escape=False) for line in lines]


def tokenizer_name(target_lang: str) -> str:
    """What `tokenize` does to this language, for signatures."""
    if _language(target_lang) in UNSPACED:
        return str(sacrebleu_metric(target_lang).tokenizer.signature())
    return f"moses-{_language(target_lang)}-sacremoses-{sacremoses.__version__}"


def compound_split(lines: Sequence[str]) -> list[str]:
    """Tokenised lines with `a-b` turned into `a ##AT##-##AT## b`, as tensor2tensor and fairseq score WMT14 En-De.

    Matches do not overlap, as in their Perl: a one-letter middle part, as in `x-y-z`, is split on its left only.
    """
    return [COMPOUND.sub(r"\1 ##AT##-##AT## \2", line) for line in lines]


def _score(name: str, metric: BLEU | CHRF | TER, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    score = metric.corpus_score(hypotheses, [references]).score
    return Score(name, score, str(metric.get_signature()))


def _multi_bleu(name: str, hypotheses: Sequence[str], references: Sequence[str], tokens: str) -> Score:
    """`multi-bleu.perl`: whitespace tokens, 4-grams of the corpus, no smoothing, brevity penalty exp(1 - ref/hyp)."""
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    score = metric.corpus_score(hypotheses, [references]).score
    return Score(name, score, str(metric.get_signature()).replace("tok:none", f"tok:{tokens}"))


def _language(tag: str) -> str:
    """The language of a tag: "pt" of "pt-BR" or "pt_BR"."""
    return re.split("[-_]", tag)[0].lower()


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references: "
            "line n of one must translate line n of the other"
        )
    if not hypotheses:
        raise UserError("cannot score an empty list of translations")
