"""Weak scaling by the TPU compiler's cycles and by the bytes over the networks, from the tables of `compilers`.

    python -m benchmarks.compilers v5p:4x4x4 500L-500L:full --config.parallel.fsdp=8 --config.train.batch_tokens=524288
    python -m benchmarks.scaling

Nothing is measured. The time of the kernels is the compiler's estimate in cycles, divided by the clock. The time of the
networks is a roofline: the bytes that a device sends, divided by the bandwidth of its links. The result is
benchmarks/results/scaling.csv and a table.
"""

from typing import Any, NamedTuple

from benchmarks.compilers import COLLECTIVES, KEY, TABLE, read, write
from benchmarks.measure import RESULTS
from branchnorm_jax.analysis import topologies
from branchnorm_jax.analysis.devices import DEVICES


class Links(NamedTuple):
    """The bytes per second that a chip of a TPU sends."""

    ring: float
    """Along one axis of the slice, on two links."""
    all: float
    """On all links of the slice."""
    between: float
    """Over the data-centre network."""


TPUS = {"v5e": Links(100e9, 200e9, 3.1e9), "v5p": Links(200e9, 600e9, 6.25e9)}
"""From Google's descriptions of Cloud TPU v5e and v5p (November 2026): 400 and 1,200 GB/s per chip in both directions
between chips; 6.4 Tbit/s for 256 chips and 50 Gbit/s per chip in the data-centre network."""


def figures(row: dict[str, str], collectives: list[dict[str, str]]) -> dict[str, Any]:
    """Returns the figures of one program."""
    target = topologies.parse(row["target"])
    tpu, clock = TPUS[target.device], DEVICES[target.device].clock
    in_loops = sum(int(c["number"]) * int(c["executions"]) * int(c["inside_bytes"]) for c in collectives if c["loop"])
    tokens, seconds = int(row["tokens"]) // target.count, int(row["cycles"]) / clock
    inside, between = int(row["inside_bytes"]), int(row["between_bytes"])
    ring, every, dcn = inside / tpu.ring, inside / tpu.all, between / tpu.between
    return {
        "chips": target.count,
        "tokens_per_chip": tokens,
        "kernel_seconds": round(seconds, 4),
        "fsdp_bytes": in_loops,
        "once_bytes": inside - in_loops,
        "between_bytes": between,
        "ring_seconds": round(ring, 4),
        "all_links_seconds": round(every, 4),
        "between_seconds": round(dcn, 4),
        # The kernels' time grows with the tokens; the bytes do not.
        "limit_ring_tokens": round(tokens * ring / seconds),
        "limit_all_links_tokens": round(tokens * every / seconds),
        "limit_between_tokens": round(tokens * dcn / seconds),
    }


def main() -> None:
    """Writes and prints the table."""
    all_collectives, rows = read(COLLECTIVES), []
    for row in read(TABLE):
        if int(row["cycles"]) and row["depth"] == "500L-500L" and row["remat"] == "full":
            own = [found for found in all_collectives if all(found[name] == row[name] for name in KEY)]
            rows.append({name: row[name] for name in KEY} | figures(row, own))
    rows.sort(key=lambda row: (row["target"][:3], row["chips"]))
    write(RESULTS / "scaling.csv", rows)
    print("| slice | options | tokens per chip | kernels, s | fsdp, GB | once, GB | DCN, GB | networks, s | limit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = " | ".join(f"{row[name] / 1e9:.2f}" for name in ("fsdp_bytes", "once_bytes", "between_bytes"))
        network = f"{row['all_links_seconds']:.3f} - {row['ring_seconds']:.3f} + {row['between_seconds']:.3f}"
        limit = f"{row['limit_all_links_tokens']} - {row['limit_ring_tokens']}, DCN {row['limit_between_tokens']}"
        head = f"{row['target']} | {row['options']} | {row['tokens_per_chip']:,} | {row['kernel_seconds']:.2f}"
        print(f"| {head} | {sizes} | {network} | {limit} |")


if __name__ == "__main__":
    main()
