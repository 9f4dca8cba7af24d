"""Entry: `python main.py --config=configs/x.py:18L-18L --workdir=runs/x [--mode=...] [--config.section.name=...]`.

The installed package provides the same command as `branchnorm`. Both run `branchnorm_jax/cli.py`.
"""

from branchnorm_jax.cli import command, main

__all__ = ["main"]

if __name__ == "__main__":
    command()
