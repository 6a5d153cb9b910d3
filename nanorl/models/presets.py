"""Which model a name stands for, and the defaults that suit it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanorl.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, all) while a model is built."""

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"

REFUSED_KEYS = ("ssm_cfg", "mamba_d_state", "linear_num_key_heads", "is_encoder_decoder")
"""Config keys of what has no plain KV cache: state-space models, linear attention, encoder-decoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults for what the configuration leaves open."""

    dtype: Literal["float32", "bfloat16"]
    lr: float
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    num_minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that is on this machine."""

    name: str
    """As asked for: `tiny`, a hub id or a folder."""
    path: str
    """A folder that transformers and SGLang load."""
    preset: Preset
    note: str = ""
    """What the user should know about the choice."""


TINY = Preset(dtype="float32", lr=6e-4, prompts_per_step=64, group_size=8, max_new_tokens=40, num_minibatches=4)
SMALL_ON_CPU = Preset(dtype="float32", lr=1e-5, prompts_per_step=4, group_size=6, max_new_tokens=48, num_minibatches=1)
ON_GPU = Preset(dtype="bfloat16", lr=1e-6, prompts_per_step=16, group_size=8, max_new_tokens=256, num_minibatches=1)


def resolve_model(name: str, *, has_gpu: bool, on_progress: Progress = lambda what, done, total: None) -> ResolvedModel:
    """Finds the model, builds the tiny one where it isn't cached yet, and checks that nanorl can train it.

    Raises:
        ModelError: no such folder, a hub that can't be reached, no tokenizer, no chat template, or an architecture that
            isn't a full-attention decoder.
    """
    if name == "auto":
        return _auto(has_gpu, on_progress)
    if name == "tiny":
        from nanorl.models.tiny import ensure_tiny  # torch

        return ResolvedModel(name=name, path=str(ensure_tiny(on_progress)), preset=TINY)
    folder = Path(name) if Path(name).exists() else _download(name)
    _check_folder(folder)
    return ResolvedModel(name=name, path=str(folder), preset=ON_GPU if has_gpu else SMALL_ON_CPU)


def _auto(has_gpu: bool, on_progress: Progress) -> ResolvedModel:
    """Qwen on a GPU where it can be had, else the tiny model."""
    if has_gpu:
        try:
            return resolve_model(QWEN, has_gpu=True)
        except ModelError:
            tiny = resolve_model("tiny", has_gpu=True, on_progress=on_progress)
            note = f"{QWEN} is neither cached nor reachable: training the built-in tiny model instead"
            return ResolvedModel(name=tiny.name, path=tiny.path, preset=tiny.preset, note=note)
    return resolve_model("tiny", has_gpu=False, on_progress=on_progress)


def _download(name: str) -> Path:
    """A hub id's snapshot, from the cache or the hub."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"Expected a folder, a Hugging Face id (owner/name), `tiny` or `auto`, got {name!r}: no such folder.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not cached: ask the hub
        try:
            return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=5))
        except Exception as error:  # the hub's client raises a dozen kinds, from its own to httpx's
            raise ModelError(
                f"{name} is not in the local cache and the model hub can't be reached ({type(error).__name__}). Two ways out: "
                "give --model a folder that holds the model, or --model tiny."
            ) from None


def _check_folder(folder: Path) -> None:
    """Raises: ModelError where the folder is no trainable chat model."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"Expected a Hugging Face model folder, {folder} has no readable config.json.")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} has no tokenizer (tokenizer.json). Copy the model's tokenizer files into it.")
    tokenizer_config = _read_json(folder / "tokenizer_config.json") or {}
    if not tokenizer_config.get("chat_template") and not any(folder.glob("chat_template*")):
        raise ModelError(
            f"{folder} has no chat template, so prompts can't be rendered. Take an instruction-tuned model, or add a "
            "chat_template.jinja."
        )
    _check_architecture(folder, config)


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type", "unknown")
    layers = set(config.get("layer_types") or [])
    if layers - {"full_attention"} or any(config.get(key) for key in REFUSED_KEYS):
        raise ModelError(
            f"{folder} is a {kind!r} model with {', '.join(sorted(layers)) or 'no plain attention'}: nanorl trains decoders with "
            "full attention in every layer."
        )
    if not any("CausalLM" in name or "LMHead" in name for name in config.get("architectures") or ["CausalLM"]):
        raise ModelError(f"{folder} holds {config['architectures']}: expected a causal language model.")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
