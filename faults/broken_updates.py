"""Updates that are broken on purpose, in a real run.

The batch of a broken update says so in the high bits of its first token. The train step, which is compiled with all
faults in it, reads and removes them. So all faults run the same program.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from branchnorm_jax.data.batches import prefetch
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.options import Config
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training import loop, lower, step


class Kind(NamedTuple):
    """A kind of fault."""

    site: str
    """What is replaced: the parameters of a layer in the forward pass, its gradient, the factor of the logits or of the
    loss scale, or a side of the batch."""
    value: float
    """The number that replaces it; the factor."""
    trouble: str
    """What the run must call it: "nonfinite", "spike", or "" if training must go on."""


KINDS: dict[str, Kind] = {
    "NaN in the forward pass": Kind("forward", math.nan, "nonfinite"),
    "infinity in the forward pass": Kind("forward", math.inf, "nonfinite"),
    "NaN in a gradient": Kind("backward", math.nan, "nonfinite"),
    "infinity in a gradient": Kind("backward", -math.inf, "nonfinite"),
    "gradients of 1e30": Kind("backward", 1e30, "nonfinite"),  # the sum of their squares is infinite
    "gradients of 1e15": Kind("backward", 1e15, ""),
    "a spike of the loss": Kind("logits", 30.0, "spike"),
    "a batch of padding": Kind("batch", 0, "nonfinite"),
    "sources of padding": Kind("source", 0, ""),
    "loss scale times 2^-24": Kind("scale", 2.0**-24, ""),
    "loss scale times 2^-14": Kind("scale", 2.0**-14, ""),
    "loss scale times 2^15": Kind("scale", 2.0**15, ""),
    "loss scale times 2^40": Kind("scale", 2.0**40, "nonfinite"),
}

PLACES = ("encoder 1", "encoder 2", "decoder 1", "decoder 2")
"""The layers in which `forward` and `backward` replace numbers."""

SHIFT = 16
"""Bits of a token id; vocabularies are smaller."""


class Fault(NamedTuple):
    """What is broken."""

    kind: str
    place: int
    first: int
    """The first broken update."""
    updates: int
    lasts: bool
    """Whether a repetition of an update is broken, too: a fault of the data, and not of the machine."""

    @property
    def broken(self) -> range:
        """The broken updates."""
        return range(self.first, self.first + self.updates)

    @property
    def mark(self) -> int:
        """The number that stands for the fault; 0 stands for none."""
        return 1 + list(KINDS).index(self.kind) * len(PLACES) + self.place

    @property
    def trouble(self) -> str:
        """What the run must call the fault. Spikes are detected from the fiftieth update on."""
        trouble = KINDS[self.kind].trouble
        return "" if trouble == "spike" and self.first < 50 else trouble


@contextlib.contextmanager
def breaking(fault: Fault | None) -> Iterator[None]:
    """Breaks the updates of a fault in this process; None: none of them, in the same program."""
    with (
        mock.patch.object(loop, "prefetch", functools.partial(marked, fault, set())),
        mock.patch.object(lower, "make_train_step", breakable),
        mock.patch.object(loop, "lower_update", lowered_once),
    ):
        yield


INSTALLED = contextlib.ExitStack()
"""Keeps what `install` has entered until the process ends."""


def install(fault: Fault | None) -> None:
    """Breaks the updates of a fault until this process ends."""
    INSTALLED.enter_context(breaking(fault))


LOWERED: dict[str, Any] = {}


def lowered_once(config: Config, model: Any, *rest: Any) -> Any:
    """Compiles an update once per program. Of the reactions to trouble, only `skip` changes the program."""
    train = config.train
    policy = "skip" if "skip" in (train.nonfinite, train.spike) else "stop"
    train = dataclasses.replace(train, steps=0, nonfinite=policy, spike=policy, rollback="batches", rollback_updates=1)
    key = repr((config.model, train, model, rest[-1]))
    if key not in LOWERED:
        program = lower.lower_update(config, model, *rest).compile()
        LOWERED[key] = SimpleNamespace(compile=lambda: program)
    return LOWERED[key]


def marked(fault: Fault | None, seen: set[int], function: Any, start: int, stop: int) -> Iterator[Any]:
    """Yields the training batches. Those of the broken updates have a mark, or are padding."""
    with contextlib.closing(prefetch(function, start, stop)) as batches:
        for number, batch in enumerate(batches, start):
            if fault and number in fault.broken and (fault.lasts or number not in seen):
                seen.add(number)
                sides = {"batch": batch, "source": [batch.source]}.get(KINDS[fault.kind].site, [])
                for side in sides:
                    side[:] = PAD
                batch.source[0, 0] += fault.mark << SHIFT
            yield batch


def breakable(*arguments: Any) -> Callable[..., Any]:
    """Returns a train step that is broken as the mark of its batch says."""
    train_step = step.make_train_step(*arguments)

    def broken(state: Any, batch: Any) -> Any:
        first = batch.source[0, 0]
        with broken_functions(first >> SHIFT):
            return train_step(state, batch._replace(source=batch.source.at[0, 0].set(first % (1 << SHIFT))))

    return broken


def broken_functions(mark: jax.Array) -> Any:
    """Returns a context in which the train step is traced with the faults in it."""
    kind, place = jnp.divmod(mark - 1, len(PLACES))

    def at(site: str) -> jax.Array:
        return jnp.array([each.site == site for each in KINDS.values()])[kind] & (mark > 0)

    def number(site: str, sound: float) -> jax.Array:
        return jnp.where(at(site), jnp.array([each.value for each in KINDS.values()], jnp.float32)[kind], sound)

    def spoiled(site: str, params: Any) -> Any:
        def of(stack: str, leaf: jax.Array) -> jax.Array:
            layers = jnp.array([PLACES.index(f"{stack} {layer + 1}") for layer in range(len(leaf))])
            hit = ((layers == place) & at(site)).reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(hit, number(site, 0.0), leaf)

        return params | {stack: jax.tree.map(functools.partial(of, stack), params[stack]) for stack in STACKS}

    def loss_sums(model: Any, params: Any, *rest: Any) -> Any:
        tables = jax.tree.map(lambda leaf: leaf * number("logits", 1.0), params["embedding"])
        return sums(model, spoiled("forward", params) | {"embedding": tables}, *rest)

    sums, update, loss_scale = step.loss_sums, step.update, step.loss_scale
    return mock.patch.multiple(
        step,
        loss_sums=loss_sums,
        update=lambda gradient, *rest: update(spoiled("backward", gradient), *rest),
        loss_scale=lambda tokens: loss_scale(tokens) * number("scale", 1.0),
    )
