"""The table of all methods, for people: what `--mode=methods` prints and writes to `docs/methods.md`."""

import textwrap
from typing import NamedTuple

import jax

from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.recipe import Depth, Recipe, Rule
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig

DEPTHS = (6, 18, 100)
"""Encoder and decoder layers whose parameters are counted."""


class Row(NamedTuple):
    """One method."""

    name: str
    equation: str
    added: tuple[int, ...]
    """Parameters more than a Post-LN Transformer of width 512/2048 has, at each of `DEPTHS`."""
    by_depth: str
    """What depends on depth."""
    recommended: str
    citation: str
    note: str


def rows() -> list[Row]:
    """The table, in the order of `METHODS`; nothing is allocated."""
    plain = [count_parameters("post_ln", layers) for layers in DEPTHS]
    return [
        Row(
            name,
            recipe.equation,
            tuple(count_parameters(name, n) - base for n, base in zip(DEPTHS, plain, strict=True)),
            depends_on_depth(recipe),
            ", ".join(f"{option}={value}" for option, value in recipe.recommended.items()),
            recipe.citation,
            recipe.note,
        )
        for name, recipe in METHODS.items()
    ]


def count_parameters(method: str, layers: int) -> int:
    """Parameters without embeddings of an N-N Transformer, width 512, feed-forward 2048, from shapes alone."""
    config = ModelConfig(method=method, encoder_layers=layers, decoder_layers=layers)
    params = Transformer(config, 8, 8).abstract_params()
    return sum(leaf.size for name, part in params.items() if name != "embedding" for leaf in jax.tree.leaves(part))


def depends_on_depth(recipe: Recipe) -> str:
    """Which numbers of a recipe differ between a layer of 6L-6L and one of 100L-100L, or from layer to layer."""

    def differs(rule: Rule | None) -> bool:
        if rule is None:
            return False
        shallow, deep = rule(Depth(6, 6)), rule(Depth(100, 100))
        return shallow != deep or any(isinstance(value, tuple) for value in shallow)

    by_layer = any(
        isinstance(rule(Depth(6, 6)).encoder, tuple)
        for rule in (recipe.pre_scale, recipe.post_layers, *recipe.gain.values())
        if rule is not None
    )
    numbers = {
        "skip weight": differs(recipe.skip.start) and not recipe.skip.learned,
        "start of the skip weight": (differs(recipe.skip.start) and bool(recipe.skip.learned)) or recipe.profiled,
        "start of the branch weight": differs(recipe.branch.start),
        "scale of the branch's input": differs(recipe.pre_scale),
        "kind of layer": differs(recipe.post_layers),
        "initial weights": any(differs(rule) for name, rule in recipe.gain.items() if not name.startswith("embedding")),
        "initial embeddings": any(differs(rule) for name, rule in recipe.gain.items() if name.startswith("embedding")),
        "combination weights": recipe.stream.startswith("combination"),
    }
    found = ", ".join(name for name, depends in numbers.items() if depends)
    return f"{found} (by layer)" if found and (by_layer or recipe.profiled) else found or "nothing"


def to_text(table: list[Row]) -> str:
    """For a terminal: a paragraph per method."""

    def line(label: str, text: str) -> str:
        return textwrap.fill(text, 116, initial_indent=f"  {label:<13}", subsequent_indent=" " * 15) if text else ""

    paragraphs = []
    for row in table:
        added = ", ".join(f"{n}L-{n}L {count:+,}" for n, count in zip(DEPTHS, row.added, strict=True))
        lines = (
            line("equation", row.equation),
            line("parameters", f"{added} against post_ln at width 512"),
            line("by depth", row.by_depth),
            line("recommended", row.recommended),
            line("paper", row.citation),
            line("note", row.note),
        )
        paragraphs.append("\n".join([row.name, *(text for text in lines if text)]))
    return "\n\n".join(paragraphs)


def to_markdown(table: list[Row]) -> str:
    """docs/methods.md."""
    lines = [
        "# Methods",
        "",
        "Made by `python main.py --mode=methods` from `branchnorm_jax/model/methods.py`. Choose one with",
        "`--config.model.method=<name>`. Recommended options are its authors'; they take effect where neither the",
        "config file nor the command line sets the option. F is attention or feed-forward, LN the norm that",
        "`model.norm` names, N and M are the layers of encoder and decoder, l counts layers from 1. Parameters are",
        "those that a Transformer of width 512 and feed-forward width 2048 has more than Post-LN's, at "
        + ", ".join(f"{n}L-{n}L" for n in DEPTHS)
        + ".",
        "",
        "| method | sub-layer | parameters | depends on depth | recommended | paper |",
        "|---|---|---|---|---|---|",
    ]
    for row in table:
        cells = (
            f"`{row.name}`",
            row.equation.replace("|", "\\|"),
            " / ".join(f"{count:+,}" for count in row.added),
            row.by_depth,
            ", ".join(f"`{option}`" for option in row.recommended.split(", ")) if row.recommended else "",
            row.citation,
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Notes", ""]
    lines += [f"- `{row.name}`: {row.note}" for row in table if row.note]
    return "\n".join(lines) + "\n"
