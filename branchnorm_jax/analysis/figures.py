"""Access to Matplotlib, an optional package."""

from typing import Any

from branchnorm_jax.errors import MissingExtraError, needs_extra
from branchnorm_jax.training import logs


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`, set up for files. Raises `MissingExtraError` if it is not installed."""
    with needs_extra("plots", "figures need matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    return pyplot


def can_draw(name: str) -> bool:
    """Returns whether the figure `name` can be drawn; if not, logs what to install."""
    try:
        pyplot()
    except MissingExtraError as error:
        logs.say(f"{name} is not drawn: {error}")
        return False
    return True
