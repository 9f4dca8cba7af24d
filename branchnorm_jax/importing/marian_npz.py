"""Marian's own models: a folder with one .npz file, its vocabularies and, as a rule, decoder.yml.

The names of the weights and the options in the file (`special:model.yml`) are Marian's. Matrices are [d_in, d_out]. The
decoder starts from a vector of zeros, and the frequencies of the positions are those of Tensor2Tensor. Marian's norms
have an epsilon of 1e-6, ours 1e-5, as in Hugging Face's copy of Marian.
"""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from branchnorm_jax.errors import UserError
from branchnorm_jax.export.fold import SUBLAYERS
from branchnorm_jax.importing.imported import Imported, Side, Values, checked_ids
from branchnorm_jax.importing.pieces import ids_of, make_side, parse
from branchnorm_jax.importing.tensors import Tensors
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import PAD

OPTIONS = "special:model.yml"

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-ffn-activation": ("swish", "relu"),
    "transformer-ffn-depth": (2,),
    "transformer-no-projection": (False,),
    "transformer-train-positions": (False,),
    "transformer-tied-layers": ([],),
    "lemma-dim-emb": (0,),
}
"""Marian's options -> the values that this project supports. Options that are missing have the first value."""

METHODS = {("", "dan", ""): "post_ln", ("n", "da", "n"): "pre_ln"}
"""(transformer-preprocess, transformer-postprocess, transformer-postprocess-top) -> `model.method`."""

SPECIAL = ("<pad>", "</s>", "<unk>")
"""Marian has no piece for padding; it gets a row of its own."""

BLOCKS = {"self": ("self", "self_Wo"), "cross": ("context", "context_Wo"), "ffn": ("ffn", "ffn_ffn")}
"""Sub-layer -> beginning of the names of its matrices, and of its norm."""


def read_folder(folder: Path) -> Imported:
    """Reads a folder with Marian's model, vocabularies and decoder.yml.

    Vocabularies are SentencePiece models (.spm), or lists of pieces (.yml) with source.spm and target.spm.

    Raises:
      UserError: if a file is missing or damaged, or if the model uses a feature that this project does not support.
    """
    described = folder / "decoder.yml"
    decoder = Values(described, _mapping(described, _text(described)) if described.exists() else {})
    path = _one(decoder, "models", sorted(folder.glob("*.npz")))
    arrays = _arrays(path)
    options = _options(path, arrays)
    model = _model_options(options)
    sizes = options.get("dim-vocabs", list)
    if not sizes or not all(isinstance(size, int) and size > 2 for size in sizes):
        raise UserError(f"{path}: dim-vocabs={sizes} is not a list of sizes")
    source, target = _vocabularies(folder, decoder, (sizes[0], sizes[-1]))
    weights = Tensors(path, arrays)
    params: dict[str, Any] = {stack: _stack(weights, stack, model) for stack in SUBLAYERS}
    if model.method == "pre_ln":
        params |= {f"{stack}_norm": _norm(weights, f"{stack}_top", "", model.width) for stack in SUBLAYERS}
    params["embedding"] = _embedding(weights, model, (sizes[0], sizes[-1]), source, target)
    weights.finish()
    return Imported(
        model=model,
        decode=DecodeConfig(
            beam_size=decoder.get("beam-size", int, 12), length_penalty=decoder.get("normalize", float, 0.0)
        ),
        source_lang="",
        target_lang="",
        params=params,
        source=source,
        target=target,
        unused=target.absent,
    )


def _one(decoder: Values, name: str, found: list[Path]) -> Path:
    """Returns the first file that decoder.yml names, or the only one of `found`."""
    folder = decoder.path.parent
    if name in decoder:
        paths = [folder / Path(text).name for text in _names(decoder, name)]
    else:
        paths = found
        if len(paths) != 1:
            raise UserError(f"{folder}: it has {len(paths)} .npz files; name one of them in decoder.yml")
    if not paths[0].is_file():
        raise UserError(f"{paths[0]}: this file is missing; {decoder.path.name} names it")
    return paths[0]


def _names(decoder: Values, name: str) -> list[str]:
    names = decoder.get(name, list)
    if not names or not all(isinstance(each, str) for each in names):
        raise UserError(f"{decoder.path}: {name} must be a list of files, not {names}")
    return names


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _options(path: Path, arrays: dict[str, np.ndarray]) -> Values:
    """Takes the options out of the arrays, and checks that this project supports them."""
    if OPTIONS not in arrays:
        raise UserError(f"{path}: it has no {OPTIONS}, so it is not a model of Marian")
    values = _mapping(path, arrays.pop(OPTIONS).tobytes().rstrip(b"\0").decode("utf-8", "replace"))
    for name, supported in SUPPORTED.items():
        if values.setdefault(name, supported[0]) not in supported:
            raise UserError(f"{path}: --{name}={values[name]} is not supported, only {', '.join(map(str, supported))}")
    return Values(path, values)


def _model_options(options: Values) -> ModelConfig:
    """Returns the options of the network."""
    key = tuple(
        options.get(f"transformer-{name}", str, "") for name in ("preprocess", "postprocess", "postprocess-top")
    )
    if key not in METHODS:
        raise UserError(
            f"{options.path}: --transformer-preprocess, -postprocess and -postprocess-top {key} are not supported"
        )
    width, heads = options.same("dim-emb"), options.same("transformer-heads")
    if width % heads or width % 2:
        raise UserError(f"{options.path}: dim-emb={width} must be even and a multiple of {heads} heads")
    tied = options.get("tied-embeddings-all", bool, False), options.get("tied-embeddings", bool, False)
    return ModelConfig(
        method=METHODS[key],
        encoder_layers=options.same("enc-depth"),
        decoder_layers=options.same("dec-depth"),
        width=width,
        ffn_width=options.same("transformer-dim-ffn"),
        heads=heads,
        activation=options.get("transformer-ffn-activation", str),
        shared_embeddings="all" if tied[0] else "decoder" if tied[1] else "none",
        positions="tensor2tensor",
        decoder_start="zero",
        output_bias=True,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _mapping(path: Path, text: str, loader: Any = yaml.SafeLoader) -> dict[str, Any]:
    """Parses YAML with names and values. Raises `UserError` if it is something else."""
    try:
        content = loader(text).get_single_data()  # yaml.load, but no other loader can be meant
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that there is not.
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())[:160]})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected names with values, not a {type(content).__name__}")
    return content


def _listed(path: Path) -> dict[str, int]:
    """Reads a vocabulary in YAML. All keys are text, also those that YAML would take for numbers."""
    texts = _mapping(path, _text(path), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    if not all(isinstance(number, str) and number.isdecimal() for number in texts.values()):
        raise UserError(f"{path}: an id is not a whole number from 0")
    return checked_ids(path, {piece: int(number) for piece, number in texts.items()})


def _vocabularies(folder: Path, decoder: Values, sizes: tuple[int, int]) -> tuple[Side, Side]:
    """Reads the vocabularies of source and target; one for both sides if the files are the same."""
    if "vocabs" in decoder:
        names = [Path(name).name for name in _names(decoder, "vocabs")]
    else:
        names = sorted({path.name for kind in ("*vocab*.yml", "*.spm") for path in folder.glob(kind)})
        # Alone, or with the SentencePiece models of both sides.
        names = [name for name in names if name.endswith(".yml")] or names
        if len(names) != 1 and names != ["source.spm", "target.spm"]:
            raise UserError(
                f"{folder}: which of its vocabularies is the source's? List them as `vocabs` in decoder.yml"
            )
    lists = all(name.endswith((".yml", ".yaml")) for name in names)
    paths = [folder / names[0], folder / names[-1]]
    spm_paths = [folder / "source.spm", folder / "target.spm"] if lists else paths
    if missing := [path for path in (*paths, *spm_paths) if not path.is_file()]:
        why = "; lists of pieces need the SentencePiece models source.spm and target.spm" if lists else ""
        raise UserError(f"{missing[0]}: this file is missing{why}")
    models = [parse(path) for path in spm_paths]
    given = [_listed(path) if lists else ids_of(model) for path, model in zip(paths, models, strict=True)]
    sides = []
    for index, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        # Marian ignores the rest of a list that is longer than --dim-vocabs.
        ids = {piece: number for piece, number in given[index].items() if number < size}
        if len(ids) < size:
            raise UserError(
                f"{path}: it has {len(ids)} pieces, but the model has {size}; it is another model's vocabulary"
            )
        if absent := [piece for piece in SPECIAL[1:] if piece not in ids]:
            raise UserError(f"{path}: the special pieces {', '.join(absent)} are missing")
        alike = models if given[0] == given[1] else [models[index]]
        sides.append(make_side(models[index], ids, SPECIAL, alike, bool(index)))
    return sides[0], sides[1]


def _embedding(
    weights: Tensors, model: ModelConfig, sizes: tuple[int, int], source: Side, target: Side
) -> dict[str, np.ndarray]:
    """Returns the embedding tables and the bias of the logits, in our order of pieces."""
    width = model.width
    bias = weights.take("decoder_ff_logit_out_b", 1, sizes[1])[0][target.rows]
    bias[target.absent] = 0.0
    if model.shared_embeddings == "all":
        return {"shared": _rows(weights.take("Wemb", sizes[0], width), source), "bias": bias}
    common = weights.take("Wemb", sizes[0], width) if "Wemb" in weights else None
    tables = {}
    for name, stack, side, size in (("source", "encoder", source, sizes[0]), ("target", "decoder", target, sizes[1])):
        table = weights.take(f"{stack}_Wemb", size, width) if common is None else common
        tables[name] = _rows(table, side)
    if model.shared_embeddings == "none":
        turned = "decoder_ff_logit_out_Wt" in weights
        shape = (sizes[1], width) if turned else (width, sizes[1])
        output = weights.take(f"decoder_ff_logit_out_{'Wt' if turned else 'W'}", *shape)
        tables["output"] = _rows(output if turned else output.T, target)
    return tables | {"bias": bias}


def _rows(table: np.ndarray, side: Side) -> np.ndarray:
    """Returns the rows of a table in our order. Marian has no padding; `MarianMTModel` starts from its row of zeros."""
    rows = table[side.rows]
    rows[PAD] = 0.0
    return rows


def _stack(weights: Tensors, stack: str, model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of the layers of a stack, [L, ...] each."""
    width, hidden = model.width, model.ffn_width
    kind, suffix = ("pre", "_pre") if model.method == "pre_ln" else ("post", "")

    def layer(number: int) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for sublayer in SUBLAYERS[stack]:
            block, norm = (f"{stack}_l{number}_{name}" for name in BLOCKS[sublayer])
            shapes = (
                {"1": (width, hidden), "2": (hidden, width)}
                if sublayer == "ffn"
                else dict.fromkeys("qkvo", (width,) * 2)
            )
            params[sublayer] = {
                f"fc{name}" if sublayer == "ffn" else name: {
                    "kernel": weights.take(f"{block}_W{name}", *shape),
                    "bias": weights.take(f"{block}_b{name}", 1, shape[1])[0],
                }
                for name, shape in shapes.items()
            }
            params[f"{sublayer}_{kind}_norm"] = _norm(weights, norm, suffix, width)
        return params

    layers = [layer(1 + index) for index in range(getattr(model, f"{stack}_layers"))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def _norm(weights: Tensors, name: str, suffix: str, width: int) -> dict[str, np.ndarray]:
    ours = {"scale": "ln_scale", "bias": "ln_bias"}
    return {leaf: weights.take(f"{name}_{theirs}{suffix}", 1, width)[0] for leaf, theirs in ours.items()}
