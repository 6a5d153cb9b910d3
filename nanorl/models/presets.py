"""Which model a name stands for, and the defaults that suit it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from nanorl.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, all) while a model is built."""

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"

REFUSED_KEYS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "attention_hidden_size",
    "linear_num_key_heads",
    "is_encoder_decoder",
)
"""Config keys of what has no plain KV cache: state-space models, RWKV, linear attention, encoder-decoders."""

TINY_HIDDEN_SIZE = 256
"""Up to here a folder is taken for a copy of the tiny model, and gets its defaults."""


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
    """`tiny`, `tiny-random`, a hub id or a folder; never `auto`."""
    path: str
    """A folder that transformers and SGLang load."""
    preset: Preset
    note: str = ""
    """What the user should know about the choice."""


TINY = Preset(dtype="float32", lr=6e-4, prompts_per_step=64, group_size=8, max_new_tokens=40, num_minibatches=4)
SMALL_ON_CPU = Preset(dtype="float32", lr=1e-5, prompts_per_step=4, group_size=6, max_new_tokens=48, num_minibatches=1)
ON_GPU = Preset(dtype="bfloat16", lr=1e-6, prompts_per_step=16, group_size=8, max_new_tokens=256, num_minibatches=1)


def resolve_model(name: str, *, has_gpu: bool, on_progress: Progress = lambda *_: None) -> ResolvedModel:
    """Finds the model, builds the tiny one where it isn't cached yet, and checks that nanorl can train it.

    Args:
        name: `auto`, `tiny`, `tiny-random` (no warm start), a folder, or a hub id.
        has_gpu: decides what `auto` is, and the defaults of real models.
        on_progress: hears of the tiny model's warm start.

    Raises:
        ModelError: no such folder, a hub that can't be reached, no tokenizer, no chat template, or an architecture that
            isn't a full-attention decoder.
    """
    if name == "auto":
        return _auto(has_gpu, on_progress)
    if name in {"tiny", "tiny-random"}:
        from nanorl.models.tiny import RANDOM, TINY_RECIPE, ensure_tiny  # torch

        recipe = TINY_RECIPE if name == "tiny" else RANDOM
        on_progress("preparing the tiny model", 0, 0)  # perhaps another process builds it right now
        path = ensure_tiny(recipe, lambda done, total: on_progress("building the tiny model", done, total))
        return ResolvedModel(name=name, path=str(path), preset=TINY)
    folder = Path(name).expanduser()
    if not folder.exists():
        folder = _download(name)
    config = check_folder(folder)
    return ResolvedModel(name=name, path=str(folder), preset=_preset(config, has_gpu))


def _preset(config: Mapping[str, Any], has_gpu: bool) -> Preset:
    if config.get("hidden_size", 0) <= TINY_HIDDEN_SIZE:
        return TINY
    return ON_GPU if has_gpu else SMALL_ON_CPU


def _auto(has_gpu: bool, on_progress: Progress) -> ResolvedModel:
    """Qwen on a GPU where it can be had, else the tiny model."""
    if not has_gpu:
        return resolve_model("tiny", has_gpu=False, on_progress=on_progress)
    try:
        return resolve_model(QWEN, has_gpu=True)
    except ModelError:
        tiny = resolve_model("tiny", has_gpu=True, on_progress=on_progress)
        return replace(tiny, note=f"{QWEN} is neither cached nor reachable: taking the built-in tiny model instead")


def _download(name: str) -> Path:
    """A hub id's snapshot, from the cache or the hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ModelError(
            f"Expected a folder, a Hugging Face id (owner/name), `tiny` or `auto`, got {name!r}: no such folder."
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError):  # not cached, or not all of it: ask the hub
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=5))
    except Exception as error:
        raise ModelError(
            f"{name} is not in the local cache and can't be had from the model hub ({type(error).__name__}). "
            "Two ways out: give --model a folder that holds the model, or --model tiny."
        ) from error


def check_folder(folder: Path) -> dict[str, Any]:
    """The folder's config.json, once it is clear that nanorl can train what lies there.

    Raises:
        ModelError: no config, weights, tokenizer or chat template, or no full-attention decoder.
    """
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"Expected a Hugging Face model folder, {folder} has no readable config.json.")
    _check_architecture(folder, config)
    _check_weights(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} has no tokenizer (tokenizer.json). Copy the model's tokenizer files into it.")
    tokenizer_config = _read_json(folder / "tokenizer_config.json") or {}
    if not tokenizer_config.get("chat_template") and not any(folder.glob("chat_template*")):
        raise ModelError(
            f"{folder} has no chat template, so prompts can't be rendered. Take an instruction-tuned model, or add a "
            "chat_template.jinja."
        )
    return config


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights (*.safetensors).")
    for file in files:
        try:
            with safe_open(file, framework="np"):  # reads the header, and compares it with the file's size
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} is damaged or half a file: {error}. Copy or download it again.") from None


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not any("CausalLM" in name or "LMHead" in name for name in architectures):
        raise ModelError(
            f"{folder} holds {', '.join(architectures) or 'nothing known'}: expected a causal language model."
        )
    other = set(config.get("layer_types") or []) - {"full_attention"}
    if _has_sliding_window(config):
        other.add("sliding_attention")
    other |= {key for key in REFUSED_KEYS if config.get(key)}
    if other:
        raise ModelError(
            f"{folder} is a {config.get('model_type', 'unknown')!r} model with {', '.join(sorted(other))}: "
            "nanorl trains decoders with full attention in every layer."
        )


def _has_sliding_window(config: Mapping[str, Any]) -> bool:
    """Whether a window cuts anything: many configs name one that is switched off, or as wide as the context."""
    window, on = config.get("sliding_window"), config.get("use_sliding_window", True)
    return bool(window and on and window < config.get("max_position_embeddings", 0))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
