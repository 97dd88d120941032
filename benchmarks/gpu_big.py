"""Models several times larger than the GPU memory they may use, trained in bf16, built empty.

    .venv/bin/python benchmarks/gpu_big.py                              # a model of Llama 3's 8-billion shape, every weight trained, in 24 GiB
    .venv/bin/python benchmarks/gpu_big.py --layers 48 --limit 40GiB    # a deeper one: the largest is where host memory and disk end
    .venv/bin/python benchmarks/gpu_big.py --model small                # a minute

As `benchmarks/big.py`, whose processes, rounds and bounds these are, on a GPU with host memory and disk behind it. Split masters, moments and bf16 weights
take 12.1 bytes a parameter (97 GB for 8 billion) in host memory, or on disk where `--host-limit` leaves no room for them. The peaks that are predicted and
measured are those of the GPU as its allocator counts them; the one from outside is the process's host memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import big
from big import Size

SIZES = {
    "llama3-8b": Size(
        family="llama", layers=32, width=4096, heads=32, key_heads=8, vocabulary=128_256, rows=8, tokens=2048, limit="24GiB", steps=10,
        learning_rate=1e-4, inner=14_336, device="cuda",
    ),
    "small": Size(
        family="llama", layers=8, width=1024, heads=16, key_heads=4, vocabulary=32_000, rows=8, tokens=512, limit="1GiB", steps=6,
        learning_rate=3e-4, inner=3_584, device="cuda",
    ),
}  # fmt: skip


def main() -> int:
    """Runs one size and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="llama3-8b")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", help="of GPU memory, instead of the size's own")
    parser.add_argument("--host-limit", help="of host memory for homes; all that the machine has if not given")
    parser.add_argument("--rows", type=int, help="sequences of a step's batch")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--bounds-every", type=int, default=3, help="rounds between measurements of the bounds; 0: none"
    )
    parser.add_argument("--directory", type=Path, help="where homes are made (on the disk to be measured)")
    parser.add_argument(
        "--output", type=Path, help="result file; by default under benchmarks/results, except for small"
    )
    arguments = parser.parse_args()
    changed = {k: getattr(arguments, k) for k in ("steps", "limit", "rows", "layers") if getattr(arguments, k)}
    size = replace(SIZES[arguments.model], **changed)
    output = arguments.output
    if output is None and arguments.model != "small":
        output = big.RESULTS / f"gpu-{arguments.model}.json"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="memfit-gpu-") as folder:
        found = big.run(
            size,
            Path(folder),
            allow=["bf16"],
            plan=None,
            bounds_every=arguments.bounds_every,
            output=output,
            host_limit=arguments.host_limit,
        )
    print(big.summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
