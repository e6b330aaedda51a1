"""Block digests in C: many blocks in one call, which lets go of the interpreter's lock once instead of for each.

Threads that digest block by block in Python take turns at that lock: two of them were slower than one, and a training
loop beside them waits for it as well.

Source: the XXH3 algorithm by Yann Collet, of which this is the 64-bit variant for inputs of more than 240 bytes with
its default secret and seed 0.
"""

from __future__ import annotations

import ctypes
import threading

import xxhash

from ..native import compiled

__all__ = ["digest_blocks"]

_WORTH = 64 << 20  # bytes digested by this process; for fewer a library is not worth being looked for

_SOURCE = """
#include <stdint.h>
#include <string.h>
typedef uint64_t u64;
static const uint8_t secret[192] = {%s};
static inline u64 load(const uint8_t *p) { u64 v; memcpy(&v, p, 8); return v; }
#ifdef __AVX2__
#include <immintrin.h>
static inline void stripe(u64 *sum, const uint8_t *p, const uint8_t *key) {
  for (int i = 0; i < 2; i++) {
    __m256i *to = (__m256i *)sum + i, v = _mm256_loadu_si256((const __m256i *)p + i);
    __m256i k = _mm256_xor_si256(v, _mm256_loadu_si256((const __m256i *)key + i));
    k = _mm256_add_epi64(_mm256_mul_epu32(k, _mm256_srli_epi64(k, 32)), _mm256_shuffle_epi32(v, 0x4e));
    _mm256_storeu_si256(to, _mm256_add_epi64(_mm256_loadu_si256(to), k));
  }
}
#else
static inline void stripe(u64 *sum, const uint8_t *p, const uint8_t *key) {
  u64 v[8], k[8];
  memcpy(v, p, 64);
  memcpy(k, key, 64);
  for (int i = 0; i < 8; i++) { k[i] ^= v[i]; sum[i] += (k[i] & 0xFFFFFFFFu) * (k[i] >> 32) + v[i ^ 1]; }
}
#endif
static inline u64 fold(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}
void digest_blocks(const uint8_t *block, int64_t count, u64 size, u64 *out) {
  for (; count > 0; count--, block += size) {
    u64 sum[8] = {0xC2B2AE3Du, 0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                  0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u, 0x9E3779B1u};
    const uint8_t *p = block;
    u64 left = size - 1;
    for (; left >= 1024; left -= 1024) {
      for (int i = 0; i < 16; i++, p += 64) stripe(sum, p, secret + 8 * i);
      for (int i = 0; i < 8; i++) sum[i] = (sum[i] ^ sum[i] >> 47 ^ load(secret + 128 + 8 * i)) * 0x9E3779B1u;
    }
    for (u64 i = 0; i < left / 64; i++, p += 64) stripe(sum, p, secret + 8 * i);
    stripe(sum, block + size - 64, secret + 121);
    u64 hash = size * 0x9E3779B185EBCA87u;
    for (int i = 0; i < 4; i++)
      hash += fold(sum[2 * i] ^ load(secret + 11 + 16 * i), sum[2 * i + 1] ^ load(secret + 19 + 16 * i));
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    *out++ = hash ^ hash >> 32;
  }
}
"""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


class _Loop:
    """Looked for once, by whoever comes first when it is worth it; the others go on without meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = False
        self._function: ctypes._NamedFuncPointer | None = None
        self._seen_bytes = 0

    def get(self, size_bytes: int) -> ctypes._NamedFuncPointer | None:
        if self._looked:
            return self._function
        self._seen_bytes += size_bytes
        if self._seen_bytes >= _WORTH and self._lock.acquire(blocking=False):
            try:
                self._function = _load()
                self._looked = True
            finally:
                self._lock.release()
        return self._function


def _load() -> ctypes._NamedFuncPointer | None:
    library = compiled("xxh3", _SOURCE % ",".join(map(str, _SECRET)))
    if library is None:
        return None
    function = library.digest_blocks
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p]
    # A compiler may be wrong, and what it left in a folder may have rotted.
    probe = bytearray(range(256)) * 9
    for size in (241, 1024, 1025, 2304):
        if _call(function, memoryview(probe)[:size], size) != xxhash.xxh3_64_digest(probe[:size])[::-1]:
            return None
    return function


def _call(function: ctypes._NamedFuncPointer, blocks: memoryview, size_bytes: int) -> bytes:
    count = len(blocks) // size_bytes
    out = (ctypes.c_uint64 * count)()
    function(ctypes.addressof(ctypes.c_char.from_buffer(blocks)), count, size_bytes, out)
    return bytes(out)


_loop = _Loop()


def digest_blocks(blocks: memoryview, size_bytes: int) -> bytes | None:
    """The `xxh3_64` of each block, little-endian; None where that cannot be had from C, or is not worth it yet.

    Args:
        blocks: contiguous, a whole number of them.
        size_bytes: of each; more than 240.
    """
    assert size_bytes > 240
    if blocks.readonly or not len(blocks):  # ctypes gives no address of memory that it may not write to
        return None
    function = _loop.get(len(blocks))
    return None if function is None else _call(function, blocks, size_bytes)
