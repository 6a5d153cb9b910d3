"""From a request's body to sequences: decoding, checks, one sequence per prompt and sample."""

import math
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from nanorl.engine.core import EngineLimits
from nanorl.engine.protocol import GenerateRequest, SamplingParams
from nanorl.engine.sequence import EngineSequence, Request

T = TypeVar("T")

MAX_INT = 2**31 - 1
"""What fits the engine's integer tensors, whatever is counted."""
MAX_SAMPLES = 65_536
"""Prompts times n of one request: each sample is an object in memory before the first token."""
MIN_TEMPERATURE = 1e-3
"""Below it logits / temperature leave fp32."""

_SGLANG_ONLY = frozenset(
    {
        # /generate
        *(
            "input_embeds",
            "image_data",
            "video_data",
            "audio_data",
            "return_hidden_states",
            "return_text_in_logprobs",
            "token_ids_logprob",
            "lora_path",
            "lora_id",
            "session_params",
            "custom_logit_processor",
            "priority",
            "data_parallel_rank",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
        ),
        # sampling_params
        *(
            "regex",
            "json_schema",
            "ebnf",
            "structural_tag",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "stop_regex",
            "logit_bias",
            "custom_params",
            "beam_width",
            "spaces_between_special_tokens",
            "stream_interval",
            "watermark",
            "choice",
        ),
        # /v1/chat/completions
        *("tools", "tool_choice", "response_format", "stream_options", "reasoning_effort"),
    }
)
"""Fields that SGLang knows and this engine doesn't: they deserve another answer than a typing error."""


class Refusal(Exception):  # noqa: N818 an answer of the HTTP server, not a fault
    """A request that is answered with an error: 400 for a mistake, 501 for what only SGLang does."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body, strictly.

    Raises:
        Refusal: not this kind of body, or a field that only SGLang supports.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        unknown = re.search(r"unknown field `(\w+)`", str(error))
        if unknown and unknown[1] in _SGLANG_ONLY:
            raise Refusal(
                f"The embedded engine has no {unknown[1]!r}; SGLang has. Leave it out or use SGLang.", 501
            ) from None
        raise Refusal(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What must be known of the engine to check a request."""

    limits: EngineLimits
    vocab_size: int
    stop_ids: tuple[int, ...]
    tokenizer: Any
    draw_seed: Callable[[], int]

    def sequences_of(self, body: GenerateRequest, request: Request) -> bool:
        """Fills `request` with its sequences, prompt by prompt, sample by sample.

        Returns:
            Whether the answer is a list.

        Raises:
            Refusal: the request makes no sense or can never fit.
        """
        prompts, is_batch = self._prompts(body)
        params = (
            body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        )
        rids = body.rid if isinstance(body.rid, list) else [body.rid] * len(prompts)
        if len(params) != len(prompts) or len(rids) != len(prompts):
            raise Refusal(
                f"{len(prompts)} prompts need as many sampling_params and rids, got {len(params)} and {len(rids)}"
            )
        if body.top_logprobs_num > 0 or body.return_routed_experts:
            raise Refusal("The embedded engine reports no top logprobs and no routed experts; SGLang does.", 501)
        for settings in params:
            _check_params(settings)
        _check_number(sum(settings.n for settings in params))
        for prompt_ids, settings, rid in zip(prompts, params, rids, strict=True):
            self._check(prompt_ids, settings, body)
            request.sequences += self._samples(prompt_ids, settings, rid, body, request)
        return is_batch or len(request.sequences) > 1

    def _prompts(self, body: GenerateRequest) -> tuple[list[list[int]], bool]:
        if (body.input_ids is None) == (body.text is None):
            raise Refusal("Either text or input_ids should be provided.")
        if body.text is not None:
            texts = body.text if isinstance(body.text, list) else [body.text]
            if not texts:
                raise Refusal("text cannot be empty.")
            return [self.tokenizer.encode(text) for text in texts], isinstance(body.text, list)
        items = body.input_ids or []
        ids = [item for item in items if isinstance(item, int)]
        lists = [item for item in items if isinstance(item, list)]
        if ids and lists:
            raise Refusal("input_ids must be one list of ids or a list of such lists, not a mixture.")
        return (lists, True) if lists else ([ids], False)

    def _check(self, prompt_ids: list[int], params: SamplingParams, body: GenerateRequest) -> None:
        if not prompt_ids:
            raise Refusal("input_ids cannot be empty.")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise Refusal(f"input_ids must be in [0, {self.vocab_size}), got {min(prompt_ids)} to {max(prompt_ids)}")
        if body.return_logprob and body.logprob_start_len > len(prompt_ids):
            raise Refusal(f"logprob_start_len={body.logprob_start_len} is beyond the {len(prompt_ids)} input tokens.")
        self._check_room(len(prompt_ids), params.max_new_tokens)

    def _check_room(self, num_prompt: int, num_new: int) -> None:
        context, total = self.limits.context_length, num_prompt + num_new
        if num_prompt >= context:
            raise Refusal(
                f"The input ({num_prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        if total > context:
            raise Refusal(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"{total} tokens: {num_prompt} tokens from the input messages and {num_new} tokens for the completion."
            )
        if total > self.limits.max_total_tokens:
            raise Refusal(
                f"{total} tokens can never fit the KV cache of {self.limits.max_total_tokens} (--max-total-tokens)."
            )

    def _samples(
        self, prompt_ids: list[int], params: SamplingParams, rid: str | None, body: GenerateRequest, request: Request
    ) -> list[EngineSequence]:
        """N sequences that share the prompt; sample i has seed + i."""
        seed = self.draw_seed() if params.sampling_seed is None else params.sampling_seed
        rid = rid or uuid.uuid4().hex
        stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        scores = body.return_logprob and body.logprob_start_len >= 0
        # As SGLang, ignore_eos switches off the request's own stop ids too.
        stop_ids = () if params.ignore_eos else tuple({*self.stop_ids, *(params.stop_token_ids or ())})
        return [
            EngineSequence(
                rid=rid if params.n == 1 else f"{rid}_{i}",
                prompt_ids=prompt_ids,
                params=params,
                seed=(seed + i + (1 << 63)) % (1 << 64) - (1 << 63),
                request=request,
                stop_ids=stop_ids,
                stop_strings=tuple(stop for stop in stops if stop),
                score_from=body.logprob_start_len if scores else None,
            )
            for i in range(params.n)
        ]


def _check_number(num_samples: int) -> None:
    if num_samples > MAX_SAMPLES:
        raise Refusal(
            f"One request may ask for {MAX_SAMPLES} samples, prompts times n, got {num_samples}. Send several."
        )


def _check_params(params: SamplingParams) -> None:
    rules = (
        (
            math.isfinite(params.temperature) and params.temperature >= 0.0,
            "temperature",
            "a non-negative finite number",
        ),
        (0.0 < params.top_p <= 1.0, "top_p", "in (0, 1]"),
        (params.top_k == -1 or 1 <= params.top_k <= MAX_INT, "top_k", "-1 (off) or at least 1, in 32 bits"),
        (0.0 <= params.min_p <= 1.0, "min_p", "in [0, 1]"),
        (0 <= params.max_new_tokens <= MAX_INT, "max_new_tokens", "at least 0, in 32 bits"),
        (1 <= params.n <= MAX_SAMPLES, "n", f"1 to {MAX_SAMPLES}"),
        (all(0 <= i <= MAX_INT for i in params.stop_token_ids or ()), "stop_token_ids", "ids in 32 bits"),
        (params.temperature == 0.0 or params.temperature >= MIN_TEMPERATURE, "temperature", "0 or at least 1e-3"),
        (
            params.sampling_seed is None or -(1 << 63) <= params.sampling_seed < 1 << 63,
            "sampling_seed",
            "a 64-bit integer",
        ),
    )
    for holds, name, rule in rules:
        if not holds:
            raise Refusal(f"{name} must be {rule}, got {getattr(params, name)}.")
