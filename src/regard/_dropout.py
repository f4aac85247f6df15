"""The dropout mask: a pure function of integers, the same on every backend.

A weight is dropped where the hash of (seed, batch, head, query, key) is below dropout_p * 2^32. csrc computes the same
hash.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _multiply(a: Tensor, constant: int) -> Tensor:
    """a * constant mod 2^32, within the range of int64."""
    low, high = constant & 0xFFFF, constant >> 16
    return (a * low + (((a * high) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _mix(a: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser: every input bit flips each output bit with probability about 1/2."""
    a = _multiply(a ^ (a >> 16), 0x85EBCA6B)
    a = _multiply(a ^ (a >> 13), 0xC2B2AE35)
    return a ^ (a >> 16)


def hash_with(state: Tensor, number: Tensor) -> Tensor:
    """Combine a 32-bit hash with a non-negative integer below 2^32."""
    return _mix(state ^ _mix((number + 0x9E3779B9) & 0xFFFFFFFF))


def dropout_keys(seed: Tensor, B: int, H: int) -> Tensor:
    """The hash of (seed, batch, head): [B, H, 1, 1]."""
    state = hash_with(hash_with(torch.zeros_like(seed), seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
    batch = torch.arange(B, device=seed.device).view(B, 1, 1, 1)
    heads = torch.arange(H, device=seed.device).view(1, H, 1, 1)
    return hash_with(hash_with(state, batch), heads)


def kept(dropout_key: Tensor, dropout_p: float, queries: Tensor, keys: Tensor) -> Tensor:
    """True where a weight is kept: [B, H, queries, keys] for the positions given."""
    return hash_with(hash_with(dropout_key, queries[:, None]), keys) >= int(dropout_p * 2**32)
