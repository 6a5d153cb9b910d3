"""A Hugging Face folder's weights, all of them or none: what trainer and engine both begin with."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from nanorl.errors import ModelError


def load_causal_lm(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a Hugging Face folder or id on the CPU.

    Raises:
        ModelError: no causal language model there that transformers can load, or one with tensors missing or of another
            shape, which transformers would fill with random numbers.
    """
    disable_progress_bar()  # it would write into the live view, and into the engine's log
    options = {"trust_remote_code": False, "ignore_mismatched_sizes": True, "output_loading_info": True}
    auto: Any = AutoModelForCausalLM  # its annotation knows no loading info
    before = get_verbosity()
    set_verbosity_error()  # no report of many lines: what it would say is checked below
    try:
        model, info = auto.from_pretrained(str(path), dtype=dtype, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"Expected a causal language model in {path}, transformers could not load it: {error}"
        ) from error
    finally:
        set_verbosity(before)
    wrong = [f"{name} missing" for name in sorted(info["missing_keys"])]
    wrong += [f"{name} of shape {list(has)}, not {list(needs)}" for name, has, needs in sorted(info["mismatched_keys"])]
    if wrong:
        raise ModelError(
            f"The weights in {path} don't fit its config.json: {'; '.join(wrong[:3])}; {len(wrong)} faults in all. "
            "Copy or download the folder again."
        )
    return model
