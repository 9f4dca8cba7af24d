"""Export to Hugging Face: a folder that `AutoModelForSeq2SeqLM` and `AutoTokenizer` load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.errors import MissingExtraError, UserError
from branchnorm_jax.export import bart, t5, tokenizers
from branchnorm_jax.export.fold import UNUSED_BIAS, Plain, without_embedding_scale
from branchnorm_jax.export.tokenizers import Tokenizer, Vocabulary
from branchnorm_jax.export.weights import save
from branchnorm_jax.model.embedding import STARTS
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS, PAD, UNK

START = "<start>"
"""Piece for the first input of a decoder that starts from zeros, if PAD does not serve."""

OUTPUT_BIAS = "a bias of the logits"

TABLES = "different embeddings of source and target"

SIZES = "vocabularies of different sizes"

ZERO = "model.decoder_start=zero"

NORM = "a norm after the embeddings"

ANY = {"model.decoder_start=eos", "model.decoder_start=pad", "model.decoder_start=unk"}
"""Features that all classes can have. The lack of a part, such as biases, is no feature, because zeros do the same."""

BART = ANY | {
    *("model.norm=layer_norm", "biases", TABLES),
    *("model.activation=relu", "model.activation=gelu", "model.activation=swish"),
}
T5 = ANY | {"model.norm=rms_norm", "model.head_width", *(f"model.activation={name}" for name in t5.ACTIVATIONS)}


class Stock(NamedTuple):
    """A class of `transformers`, and the features that it can have, and that it always has."""

    name: str
    model_type: str
    can: set[str]
    must: set[str]


STOCK = (
    Stock(
        *("MarianMTModel", "marian"),
        BART | {"Post-LN", "model.positions=marian", "model.positions=tensor2tensor", OUTPUT_BIAS, SIZES, ZERO},
        set(),
    ),
    Stock("FSMTForConditionalGeneration", "fsmt", BART | {"Post-LN", "model.positions=fairseq", SIZES}, set()),
    Stock("BartForConditionalGeneration", "bart", BART | {"Post-LN", "model.positions=learned", OUTPUT_BIAS}, {NORM}),
    Stock("M2M100ForConditionalGeneration", "m2m_100", BART | {"Pre-LN", "model.positions=fairseq"}, set()),
    Stock("MBartForConditionalGeneration", "mbart", BART | {"Pre-LN", "model.positions=learned", OUTPUT_BIAS}, {NORM}),
    Stock("T5ForConditionalGeneration", "t5", T5 | {"Pre-LN", "model.positions=relative"}, set()),
)
"""Known classes. A model is exported to the first one that fits."""


def features(plain: Plain, config: ModelConfig) -> set[str]:
    """Returns what decides which class can represent a model."""
    used = np.delete(plain.bias, plain.unused)
    biases = [leaf for stack in plain.layers.values() for name in stack for leaf in _biases(stack[name])]
    holds = {
        "Pre-LN": plain.pre_norm,
        "Post-LN": not plain.pre_norm,
        NORM: bool(plain.embedding_norm),
        "biases": any(leaf.any() for leaf in biases),
        "model.head_width": config.heads * config.key_width != config.width,
        TABLES: not np.array_equal(plain.tables["source"], plain.tables["target"]),
        SIZES: len(plain.tables["source"]) != len(plain.tables["target"]),
        OUTPUT_BIAS: bool(used.any()),
        "a factor per feature in the first skip connection": any(
            (scale != scale[0]).any() for scale in plain.embedding_scale.values()
        ),
    }
    options = {name: getattr(config, name) for name in ("positions", "norm", "activation", "decoder_start")}
    return {name for name, true in holds.items() if true} | {f"model.{name}={value}" for name, value in options.items()}


def _biases(sublayer: dict[str, Any]) -> list[np.ndarray]:
    return [matrix["bias"] for matrix in sublayer.values() if isinstance(matrix, dict)]


def fitting(plain: Plain, config: ModelConfig) -> Stock:
    """Returns the class that can represent a folded model.

    Raises:
      UserError: if there is none; names what the closest ones lack.
    """
    has = features(plain, config)
    faults = [
        [f"cannot have {each}" for each in sorted(has - stock.can - stock.must)]
        + [f"always has {each}" for each in sorted(stock.must - has)]
        for stock in STOCK
    ]
    fewest = min(map(len, faults))
    closest = [(stock, each) for stock, each in zip(STOCK, faults, strict=True) if len(each) == fewest]
    if fewest:
        reasons = "; ".join(f"{stock.name} {' and '.join(each)}" for stock, each in closest)
        raise UserError(f"export: no class of transformers can represent this model: {reasons}")
    return closest[0][0]


def write(
    plain: Plain, config: ModelConfig, decode: DecodeConfig, vocabulary: Vocabulary, folder: Path, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the weights, the configs and the files of the tokenizer.

    The weights go to model.safetensors, the configs to config.json and generation_config.json.

    Args:
      plain: the folded model.
      config: options of the model.
      decode: decoding options.
      vocabulary: pieces of both sides.
      folder: existing folder.
      longest: maximum sequence length of the exported model.

    Returns:
      The folder's ids of our source and target tokens.

    Raises:
      UserError: if no class can represent the model.
    """
    stock = fitting(plain, config)
    plain, start = without_embedding_scale(plain), STARTS.get(config.decoder_start, EOS)
    if config.decoder_start == "zero":
        start = PAD
        if plain.tables["target"][PAD].any():
            # Training has changed the row of PAD, so the decoder starts from a further row.
            plain, start = _with_zero_row(plain), len(plain.tables["target"])
            vocabulary = vocabulary.extended(START)
    tokenizer = _tokenizer(stock, plain, vocabulary)
    ids = _ids(tokenizer.source, len(vocabulary.source)), _ids(tokenizer.target, len(vocabulary.target))
    plain = plain.with_rows(tokenizer.source, tokenizer.target)
    tokens: dict[str, Any] = {
        "pad_token_id": int(ids[1][PAD]),
        "eos_token_id": int(ids[1][EOS]),
        "bos_token_id": int(ids[1][EOS]),
        "forced_eos_token_id": int(ids[1][EOS]),
        "decoder_start_token_id": int(ids[1][start]),
    }
    if vocabulary.begins in vocabulary.target:
        tokens["forced_bos_token_id"] = int(ids[1][vocabulary.target.index(vocabulary.begins)])
    search = generation_config(decode, longest, tokens["pad_token_id"])
    if OUTPUT_BIAS not in stock.can and plain.unused:
        # With both options, `generate` computes the same probabilities as a bias of minus infinity.
        search |= {"suppress_tokens": plain.unused, "renormalize_logits": True}
    found, settings = _network(stock, plain, config, longest)
    architecture = {"model_type": stock.model_type, "architectures": [stock.name], "dtype": "float32"}
    files = tokenizer.files | {
        "config.json": tokenizers.encoded(architecture | settings | tokens),
        "generation_config.json": tokenizers.encoded(search | tokens),
        "tokenizer_config.json": tokenizers.encoded(tokenizer.options | {"model_max_length": longest}),
    }
    save(found, folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return ids


def _network(
    stock: Stock, plain: Plain, config: ModelConfig, longest: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the weights by name, and the options of the network."""
    if stock.model_type == "t5":
        return t5.weights(plain, config), t5.settings(plain, config)
    tables, shared = bart.tables(plain, stock.model_type)
    bias = {"final_logits_bias": plain.bias[None]} if OUTPUT_BIAS in stock.can else {}
    found = tables | bias | bart.weights(plain)
    if config.positions == "tensor2tensor":
        found |= dict.fromkeys(bart.POSITIONS, bart.positions(longest, config.width))
    # A table of learned positions is written as a whole.
    return found, shared | bart.settings(config, config.longest or longest)


def _tokenizer(stock: Stock, plain: Plain, vocabulary: Vocabulary) -> Tokenizer:
    """Returns the tokenizer of the class, if it can split text as we do, and otherwise a MarianTokenizer."""
    tables = plain.tables["source"], plain.tables["target"]
    shared = vocabulary.source == vocabulary.target and np.array_equal(*tables)
    if stock.model_type == "marian":
        return tokenizers.marian(vocabulary, [PAD, EOS, UNK], shared)
    if stock.model_type == "t5":
        return tokenizers.t5(vocabulary) or tokenizers.marian(vocabulary, [PAD, EOS, UNK], shared)
    # An import gives the row of UNK to pieces that the imported model does not have.
    absent = [index for index in plain.unused if np.array_equal(tables[0][index], tables[0][UNK])]
    # M2M100's positions begin after the id of PAD, which is 1 there.
    own = tokenizers.multilingual(vocabulary, stock.model_type, absent)
    return own or tokenizers.marian(vocabulary, [EOS, PAD, UNK], shared)


def _ids(rows: Sequence[int], size: int) -> np.ndarray:
    """Returns their ids of our tokens; that of UNK for tokens that they do not have."""
    theirs = np.full(size, rows.index(UNK))
    theirs[list(rows)] = np.arange(len(rows))
    return theirs


def generation_config(decode: DecodeConfig, longest: int, pad: int) -> dict[str, Any]:
    """Returns the options of beam search under their names in `transformers`.

    Args:
      decode: the options.
      longest: maximum number of tokens.
      pad: id of PAD.
    """
    return {
        "num_beams": decode.beam_size,
        "length_penalty": decode.length_penalty,
        "early_stopping": decode.beam_size > 1,
        "max_length": longest,
        "min_new_tokens": decode.min_length,  # "min_length" would include the decoder start token
        "num_return_sequences": decode.nbest,
        "no_repeat_ngram_size": decode.no_repeat_ngram,
        "bad_words_ids": [[pad]],
    }


def _with_zero_row(plain: Plain) -> Plain:
    """Appends a row of zeros to each table, for a piece with probability 0. Tables that are one array stay one."""
    longer = {id(table): np.concatenate([table, np.zeros_like(table[:1])]) for table in plain.tables.values()}
    tables = {name: longer[id(table)] for name, table in plain.tables.items()}
    return plain._replace(tables=tables, bias=np.append(plain.bias, np.float32(UNUSED_BIAS)))


def log_probs(folder: Path, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[np.ndarray]:
    """Returns the natural log-probabilities of the target tokens in a folder that `transformers` loads.

    `sources` and `targets` are the folder's token ids, with EOS. Tokens that `generate` suppresses have probability 0.

    Raises:
      MissingExtraError: if `transformers` or `torch` is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForSeq2SeqLM
    except ImportError as error:
        raise MissingExtraError(f"{error}; run `pip install torch transformers`") from error
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    starts = model.config.decoder_start_token_id, model.generation_config.decoder_start_token_id
    # T5 models without this option start from padding.
    start = next((token for token in starts if token is not None), model.config.pad_token_id)
    suppressed = model.generation_config.suppress_tokens or []
    results = []
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            inputs = torch.tensor([[start, *target[:-1]]])
            # With a cache, FSMT has no causal mask.
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=inputs, use_cache=False).logits
            logits[..., suppressed] = -torch.inf
            picked = logits.log_softmax(-1)[0].gather(1, torch.tensor(target)[:, None])
            results.append(picked[:, 0].numpy())
    return results
