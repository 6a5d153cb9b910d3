"""One checksum for both sides of a sync: SGLang's own, so that its /weights_checker compares too. It has two."""

import hashlib

import torch
from torch import Tensor

_TILE, _CHUNK = 8192, 1 << 20
"""32-bit words that are hashed together; words that are in work at once, which bounds the memory."""
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_LOW = 0xFFFFFFFF


def tensor_checksum(tensor: Tensor, device_type: str | None = None) -> str:
    """16 hex digits of a tensor's raw bytes; equal bits, equal checksum.

    Args:
        tensor: any shape and dtype, on any device.
        device_type: the engine's; None: the tensor's own. On a CPU SGLang takes the first 8 bytes of SHA-256, on a GPU
            a sum of mixed 32-bit words.

    Source: sglang/srt/managers/mm_utils.py and sglang/kernels/ops/memory/gpu_tensor_hash.py (0.5.23).
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if (device_type or tensor.device.type) == "cpu":
        return hashlib.sha256(data.cpu().numpy().data).digest()[:8].hex()
    return f"{_word_hash(data):016x}"


def _word_hash(data: Tensor) -> int:
    """[bytes] uint8 -> 64 bits. Arithmetic modulo 2^32 in int64, whose own overflow doesn't touch the low half."""
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), _CHUNK):
        total += _tiles_hash(words[start : start + _CHUNK].long() & _LOW, start, len(words) * 4)
    return _mix64(total & ((1 << 64) - 1)) if len(words) else 0


def _tiles_hash(words: Tensor, start: int, num_bytes: int) -> int:
    """Sum of the tiles' hashes; `start` is the position of the first word in the whole, a multiple of _TILE."""
    position = torch.arange(start, start + len(words), device=words.device)
    halves: list[Tensor] = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITION, strict=True):
        turned = (position << turn | position >> (32 - turn)) & _LOW
        mixed = _mix32(words ^ (position * factor + seed & _LOW) ^ turned)
        padded = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE)
        halves.append(_mix32(padded.sum(-1) & _LOW ^ num_bytes & _LOW))
    high, low = (int(half.sum()) for half in halves)
    return (high << 32) + low


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer, elementwise on 32 bits in int64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _LOW
    x = (x ^ x >> 13) * 0xC2B2AE35 & _LOW
    return x ^ x >> 16


def _mix64(x: int) -> int:
    """SplitMix64's finalizer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31
