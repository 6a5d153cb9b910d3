"""Proof that the engine holds what the trainer sent: names and shapes before anything is sent, bits afterwards.

An engine ignores unknown names in silence, and a wrong shape kills SGLang: so both are compared before the first sync.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nanorl.engine.checksum import tensor_checksum
from nanorl.engine.client import EngineClient
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.bucket import wire_dtype

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_FUSED: Sequence[tuple[str, tuple[str, ...]]] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
"""Parameters that SGLang keeps as one, stacked along the first dimension in this order."""
_VOCABULARY_ROWS = 64
"""SGLang pads embedding and head with zero rows to a multiple of this."""
_CHEAP_MAX_NUMEL = 1 << 20
"""SGLang makes Python floats of a whole parameter before it truncates: ask for small ones only."""


def engine_dtype(client: EngineClient) -> torch.dtype | None:
    """What the engine stores parameters in; None where it doesn't say, then tensors travel as they are."""
    dtype = getattr(torch, str(client.server_info().get("dtype")).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def check_shapes(client: EngineClient, tensors: Tensors) -> None:
    """Compares names and shapes with the model that the engine serves, before anything is sent.

    Raises:
        WeightSyncError: they differ; nothing was sent.
    """
    expected = _engine_shapes(client)
    faults: list[str] = []
    for name in sorted(expected.keys() | tensors.keys()):
        theirs, ours = expected.get(name), tuple(tensors[name].shape) if name in tensors else None
        if theirs != ours:
            faults.append(f"{name}: engine {_shown(theirs)}, trainer {_shown(ours)}")
    if faults:
        raise WeightSyncError(
            f"The engine {client.url} serves {client.model_info().model_path}, another model than the trainer's; "
            f"nothing was sent. {_listed(faults)}"
        )


def check_first_values(client: EngineClient, tensors: Tensors, dtype: torch.dtype | None, version: int) -> bool:
    """The cheap check: the first row of one parameter, another one at each version, equal to the bit.

    Returns:
        Whether the engine told its values: SGLang does for Llama only.

    Raises:
        WeightSyncError: the engine holds other values.
    """
    # SGLang cuts keys and values out of its fused parameter wrongly where head_dim isn't hidden_size / heads.
    names = [
        n
        for n, t in tensors.items()
        if t.dim() and 0 < t.numel() <= _CHEAP_MAX_NUMEL and "k_proj" not in n and "v_proj" not in n
    ]
    if not names:
        return False
    name = names[version % len(names)]
    held = client.get_weights_by_name(name, truncate_size=1)
    if held is None:
        return False
    row = tensors[name][:1]
    expected: list[Any] = row.to(wire_dtype(row, dtype)).float().tolist()
    if held != expected:
        raise WeightSyncError(
            f"After the sync of version {version} the engine {client.url} holds other values of {name} than the "
            f"trainer: expected {str(expected)[:120]}, got {str(held)[:120]}"
        )
    return True


def check_all(client: EngineClient, tensors: Tensors, dtype: torch.dtype | None) -> int:
    """Compares every tensor with the engine's by checksum.

    Returns:
        How many of the trainer's tensors were compared: all of them.

    Raises:
        WeightSyncError: some differ, or the engine reports no checksum for them.
    """
    device_type = str(client.server_info().get("device", "cuda")).partition(":")[0]
    unseen, differing = set(tensors), list[str]()
    for held_name, checksum in client.weights_checksum().items():
        parts = _parts_of(held_name, tensors)
        unseen -= set(parts)
        if parts and not _matches([tensors[part] for part in parts], dtype, device_type, checksum):
            differing.append(f"{held_name}: other bits")
    faults = differing + [f"{name}: the engine reports no checksum" for name in sorted(unseen)]
    if faults:
        raise WeightSyncError(f"The engine {client.url} holds other weights than the trainer. {_listed(faults)}")
    return len(tensors)


def _matches(parts: Sequence[torch.Tensor], dtype: torch.dtype | None, device_type: str, checksum: str) -> bool:
    stacked = torch.cat([part.to(wire_dtype(part, dtype)) for part in parts]) if len(parts) > 1 else parts[0]
    stacked = stacked.to(wire_dtype(stacked, dtype))
    if tensor_checksum(stacked, device_type) == checksum:
        return True
    missing_rows = -stacked.shape[0] % _VOCABULARY_ROWS if stacked.dim() == 2 else 0
    if not missing_rows:
        return False
    return tensor_checksum(torch.nn.functional.pad(stacked, (0, 0, 0, missing_rows)), device_type) == checksum


def _parts_of(held_name: str, tensors: Tensors) -> list[str]:
    """The trainer's names behind one of the engine's: itself, the parts of a fused one, or none."""
    if held_name in tensors:
        return [held_name]
    for fused, parts in _FUSED:
        names = [held_name.replace(fused, part) for part in parts]
        if fused in held_name and all(name in tensors for name in names):
            return names
    return []


def _engine_shapes(client: EngineClient) -> Shapes:
    """{Hugging Face name: shape} of the engine's model: as it tells, or as its model's configuration says."""
    info: dict[str, Any] = client.server_info()
    told = info.get("parameters")
    if told is not None:
        return {name: tuple(entry["shape"]) for name, entry in told.items()}
    # /model_info names the folder of the last update from disk; this one stays the model that was launched.
    return dict(_configured_shapes(str(info.get("model_path"))))


def _configured_shapes(model_path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of a folder's or hub id's model, without loading it; tied parameters once, persistent buffers too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"Can't compare shapes: the configuration of the engine's model {model_path!r} can't be read: {error}"
        ) from None
    persistent = model.state_dict().keys()
    yield from ((name, tuple(p.shape)) for name, p in model.named_parameters())
    yield from ((name, tuple(b.shape)) for name, b in model.named_buffers() if name in persistent)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "has none" if shape is None else str(list(shape))


def _listed(faults: Sequence[str], limit: int = 5) -> str:
    more = f"; and {len(faults) - limit} more" if len(faults) > limit else ""
    return "; ".join(faults[:limit]) + more
