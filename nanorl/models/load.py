"""A Hugging Face folder's weights, all of them or none: what trainer and engine both begin with."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from nanorl.errors import ModelError


def load_causal_lm(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a Hugging Face folder or id on the CPU.

    Raises:
        ModelError: no causal language model there that transformers can load, or one with tensors missing, which
            transformers would fill with random numbers.
    """
    disable_progress_bar()  # it would write into the live view, and into the engine's log
    try:
        auto: Any = AutoModelForCausalLM  # its annotation knows no loading info
        model, info = auto.from_pretrained(str(path), dtype=dtype, trust_remote_code=False, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip()
        raise ModelError(
            f"Expected a causal language model in {path}, transformers could not load it: {reason}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {path} lack {len(missing)} tensors of the model: {', '.join(missing[:3])}. "
            "Copy or download them again."
        )
    return model
