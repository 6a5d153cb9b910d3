"""SGLang's HTTP dialect as types: the bodies that nanorl's client sends and its embedded engine answers.

One definition serves both sides. Field names are SGLang's own. Bodies are decoded strictly where nanorl is the server
(an unknown field is an error, never ignored in silence) and loosely where it is the client (servers may add fields).
"""

from typing import Any, Literal

import msgspec

from nanorl.errors import EngineError
from nanorl.types import Completion, VersionSpan

PauseMode = Literal["abort", "retract", "in_place"]

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

FLATTENED_BUCKET = "flattened_bucket"
"""load_format of a weight update that carries one flat uint8 tensor and where each parameter lies in it."""


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to sample: SGLang's names and defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    """Seeds the request's own noise; sample i of n uses sampling_seed + i. None: the engine draws one."""
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


class GenerateRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /generate: one prompt or a list of prompts, as ids or as text."""

    input_ids: list[int | list[int]] | None = None
    """Ids of one prompt, or a list of such lists."""
    text: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = msgspec.field(default_factory=SamplingParams)
    """One for all prompts, or one a prompt."""
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    """>= 0: input_token_logprobs from this position on; -1: none."""
    top_logprobs_num: int = 0
    stream: bool = False
    return_routed_experts: bool = False


class ReportedSpan(msgspec.Struct, frozen=True):
    """Response tokens [start, end) were sampled at `version` (a string in SGLang)."""

    version: str | int
    start: int
    end: int


class FinishInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a generation ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop id or string that ended it, with type stop."""
    length: int | None = None
    """The budget that ended it, with type length."""
    message: str | None = None


TokenLogprob = tuple[float | None, int, str | None]
"""(logprob in nats, token id, text): as SGLang writes each entry; the first input token has no logprob."""


class MetaInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What a generation answer says beside the ids."""

    id: str
    finish_reason: FinishInfo | None
    """None only in the middle of a stream."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | int = "default"
    weight_versions: list[ReportedSpan] | None = None
    num_retractions: int = 0
    input_token_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])
    output_token_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list[TokenLogprob])


class GenerateAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """One element of /generate's answer (a list of them for several prompts or n > 1)."""

    text: str | None = None
    output_ids: list[int] = msgspec.field(default_factory=list[int])
    meta_info: MetaInfo


class WeightUpdateFromTensor(msgspec.Struct, kw_only=True, frozen=True):
    """POST /update_weights_from_tensor."""

    serialized_named_tensors: list[str]
    """One base64 ForkingPickler dump a tensor-parallel rank."""
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None
    abort_all_requests: bool = False
    selector: str = "all"


class WeightUpdateFromDisk(msgspec.Struct, kw_only=True, frozen=True):
    """POST /update_weights_from_disk: a Hugging Face folder that the engine can read."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /abort_request: one request (and those whose id starts with `rid`), or all."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /pause_generation. Name the mode: the default kills what runs."""

    mode: PauseMode = "abort"


class BeginUpdateBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /begin_weight_update."""

    selector: str = "all"


class WeightVersionBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /update_weight_version: names the weights without changing them."""

    new_version: str
    abort_all_requests: bool = True


class WeightByNameBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /get_weights_by_name."""

    name: str
    truncate_size: int = 100


class CheckWeightsBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /weights_checker."""

    action: str = "checksum"


class ChatMessage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One message of a chat; passed on to the template as it is."""

    role: str
    content: Any = ""


class ChatRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/chat/completions: the part of OpenAI's request that the embedded engine answers."""

    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    stream: bool = False
    user: str | None = None
    # SGLang's additions
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def version_number(version: str | int) -> int:
    """SGLang reports versions as strings, "default" before the first update: that is 0.

    Raises:
        EngineError: the engine holds weights of somebody who doesn't count.
    """
    if version == "default":
        return 0
    try:
        return int(version)
    except ValueError:
        raise EngineError(
            f"Expected the engine's weight version to be a number, got {version!r}: was it updated by another tool? "
            "Restart it, or let nanorl start its own."
        ) from None


def to_completion(answer: GenerateAnswer) -> Completion:
    """The engine's answer as nanorl's type: ids and logprobs as sampled, a version for every token.

    Servers that report no spans (SGLang before 0.5.21) get one span of meta_info.weight_version.
    """
    meta = answer.meta_info
    if meta.output_token_logprobs:
        token_ids = tuple(entry[1] for entry in meta.output_token_logprobs)
        logprobs = tuple(float(entry[0] or 0.0) for entry in meta.output_token_logprobs)
    else:
        token_ids, logprobs = tuple(answer.output_ids), ()
    if meta.weight_versions:
        filled = (s for s in meta.weight_versions if s.end > s.start)
        spans = tuple(VersionSpan(version_number(s.version), s.start, s.end) for s in filled)
    else:
        spans = (VersionSpan(version_number(meta.weight_version), 0, len(token_ids)),) if token_ids else ()
    if meta.finish_reason is None:
        raise EngineError(f"The engine's answer {meta.id!r} has no finish_reason: it isn't finished")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=spans,
        finish_reason=meta.finish_reason.type,
        num_cached_tokens=meta.cached_tokens,
        error=meta.finish_reason.message,
    )


def decode_answers(body: bytes) -> list[GenerateAnswer]:
    """/generate's answer, always as a list.

    Raises:
        EngineError: the body is not what /generate answers.
    """
    try:
        decoded = msgspec.json.decode(body, type=GenerateAnswer | list[GenerateAnswer])
    except msgspec.DecodeError as error:
        raise EngineError(
            f"Expected /generate to answer text, output_ids and meta_info, got {body[:200]!r}: {error}"
        ) from None
    return decoded if isinstance(decoded, list) else [decoded]


def to_body(message: msgspec.Struct) -> dict[str, Any]:
    """A message as the JSON object that goes over the wire, defaults left out where the type says so."""
    return msgspec.to_builtins(message)
