"""How fast fingerprints are computed, by the shape of the tensor, with the compiled loop and without.

    python -m benchmarks.fingerprints [--mb 64] [--rounds 5]

The best of the rounds, since other work on the machine only ever makes it slower; on one thread.
"""

from __future__ import annotations

import argparse

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from resilio.clock import SystemClock
from resilio.state.fingerprint import fp1

_clock = SystemClock()


def tensors(mb: float) -> dict[str, torch.Tensor]:
    """Of `mb` each: the kinds of shapes that models and optimizers have."""
    count = int(mb * 1e6 / 4)
    words = torch.randint(0, 1 << 31, (count,), dtype=torch.int32)
    return {
        "(n, 1024)": _shaped(words, 1024).view(torch.float32),
        "(n, 1024) bfloat16": _shaped(words, 512).view(torch.bfloat16),
        "(n, 1024) transposed": _shaped(words, 1024).T,
        "(n,)": words,
        "(n,) bfloat16": words.view(torch.bfloat16),
        "(n,) uint8": words.view(torch.uint8),
        "(n,) int64": words[: count // 2 * 2].view(torch.int64),
        "(n, 1)": _shaped(words, 1),
        "(n, 3)": _shaped(words, 3),
        "(n, 64)": _shaped(words, 64),
        "(3, n)": words[: count // 3 * 3].reshape(3, -1),
        "(n, 16, 3, 3)": _shaped(words, 144).reshape(-1, 16, 3, 3),
        "(n, 1024)[:, ::2]": _shaped(words, 1024)[:, ::2],
    }


def _shaped(words: torch.Tensor, columns: int) -> torch.Tensor:
    return words[: len(words) // columns * columns].view(-1, columns)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fingerprints", description=__doc__)
    parser.add_argument("--mb", type=float, default=64, help="of each tensor, 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("shape", "compiled GB/s", "plain torch GB/s", box=SIMPLE)
    for name, tensor in tensors(options.mb).items():
        times: dict[bool, list[float]] = {True: [], False: []}
        found = set()
        for _ in range(options.rounds):
            for compiled, seconds in times.items():
                start = _clock.monotonic_s()
                found.add(fp1(tensor, compiled=compiled))
                seconds.append(_clock.monotonic_s() - start)
        if len(found) != 1:
            raise AssertionError(f"{name}: the two ways differ: {found}")
        size = tensor.numel() * tensor.element_size()
        table.add_row(name, *(f"{size / 1e9 / min(seconds):.2f}" for seconds in times.values()))
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
