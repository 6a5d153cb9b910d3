"""One checksum for both sides of a sync: SGLang's own on a CPU, so that its /weights_checker compares too."""

import hashlib

import torch


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The first 8 bytes of the SHA-256 of a tensor's raw bytes, as 16 hex digits; equal bits, equal checksum.

    Source: sglang/srt/managers/mm_utils.py tensor_hash (0.5.23), on CPU tensors.
    """
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()
