"""The inner loop of fingerprints in C, where there is a compiler. Several times the speed of plain torch on a CPU.

It is compiled when the first large tensor comes, see `resilio.native`. Whatever goes wrong on the way leaves the plain
way, which has the same result.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from ..native import compiled

__all__ = ["Kernel", "kernel"]

# Columns are taken in blocks, so that their weights stay in the first-level cache over all rows. Weights that are used
# once are made where they are: a table of them would be larger than the tensor.
_SOURCE = """
#include <stdint.h>
#define BLOCK 1024
#define ROWS 256
void fp1_weights(uint64_t from, int64_t count, uint64_t *out) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t x = from + i;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    out[i] = (x ^ (x >> 31)) | 1;
  }
}
#define KERNEL(NAME, T) \
void NAME(const T *x, int64_t rows, int64_t cols, const uint64_t *in, const uint64_t *out, uint64_t *sum) { \
  const uint64_t *a = in, *b = in + cols, *c = out, *d = out + rows; \
  uint64_t s = 0, t = 0; \
  for (int64_t at = 0; at < cols; at += BLOCK) { \
    int64_t n = cols - at < BLOCK ? cols - at : BLOCK; \
    for (int64_t r = 0; r < rows; r++) { \
      const T *p = x + r * cols + at; \
      uint64_t u = 0, v = 0; \
      for (int64_t i = 0; i < n; i++) { u += p[i] * a[at + i]; v += p[i] * b[at + i]; } \
      s += u * c[r]; t += v * d[r]; \
    } \
  } \
  sum[0] += s; sum[1] += t; \
} \
void NAME##_long(const T *x, int64_t rows, int64_t cols, const uint64_t *in, const uint64_t *from, uint64_t *sum) { \
  uint64_t out[2 * ROWS]; \
  for (int64_t at = 0; at < rows; at += ROWS) { \
    int64_t n = rows - at < ROWS ? rows - at : ROWS; \
    fp1_weights(from[0] + at, n, out); \
    fp1_weights(from[1] + at, n, out + n); \
    if (cols > 1) { \
      NAME(x + at * cols, n, cols, in, out, sum); \
    } else { \
      uint64_t one[2] = {0, 0}; \
      const uint64_t unit[2] = {1, 1}; \
      NAME(x + at, 1, n, out, unit, one); \
      sum[0] += one[0] * in[0]; sum[1] += one[1] * in[1]; \
    } \
  } \
}
KERNEL(fp1_1, uint8_t)
KERNEL(fp1_2, uint16_t)
KERNEL(fp1_4, uint32_t)
"""


class Kernel:
    """The compiled loop.

    Args:
        library: what was loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = {}
        for name in (f"fp1_{width}{kind}" for width in (1, 2, 4) for kind in ("", "_long")):
            function = library[name]
            function.restype = None
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3]
            self._functions[name] = function
        self._weights = library.fp1_weights
        self._weights.restype = None
        self._weights.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p]

    def add(self, words: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, into: torch.Tensor) -> None:
        """Add `sum over r, c of words[r, c] * outer[lane, r] * inner[lane, c]` to `into[lane]`.

        Args:
            words: (rows, cols) unsigned of 1, 2 or 4 bytes; contiguous, on the CPU, like all the others.
            inner: (2, cols) int64.
            outer: (2, rows) int64.
            into: (2,) int64.
        """
        assert outer.shape == (2, len(words))
        self._call("", words, inner, outer, into)

    def add_long(self, words: torch.Tensor, inner: torch.Tensor, first: torch.Tensor, into: torch.Tensor) -> None:
        """As `add`, where `outer` are the weights whose numbers, before they are mixed, run from `first[lane]` on."""
        assert first.shape == (2,)
        self._call("_long", words, inner, first, into)

    def _call(self, kind: str, words: torch.Tensor, *others: torch.Tensor) -> None:
        assert all(one.is_contiguous() and one.device.type == "cpu" for one in (words, *others))
        inner, outer, into = (one.data_ptr() for one in others)
        # Without the GIL.
        self._functions[f"fp1_{words.element_size()}{kind}"](words.data_ptr(), *words.shape, inner, outer, into)

    def weights(self, first: int, size: int) -> torch.Tensor:
        """(size,): the weights whose numbers, before they are mixed, run from `first` on; int64 with their bits."""
        made = torch.empty(size, dtype=torch.int64)
        self._weights(first, size, made.data_ptr())
        return made


@cache
def kernel() -> Kernel | None:
    """The compiled loop, or None where there is none to be had. Never raises an `Exception`.

    Blocks: for some tenths of a second, the first time on a machine.
    """
    library = compiled("fp1", _SOURCE)
    return None if library is None else Kernel(library)
