"""The engine's control plane: state, pausing, the weight session, rescoring. Synchronous, one kept connection.

Works against SGLang 0.5.17 and newer and nanorl's embedded engine alike; generation in bulk is
`nanorl.engine.generation`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from nanorl.engine.connection import HttpConnection, error_message
from nanorl.engine.protocol import (
    GenerateRequest,
    MemoryTag,
    PauseMode,
    SamplingParams,
    WeightUpdateFromDisk,
    WeightUpdateFromTensor,
    decode_answers,
    to_body,
    version_number,
)
from nanorl.errors import EngineError, NanoRLError, WeightSyncError

Number = TypeVar("Number", int, float)

FLUSH_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Waits between the tries to flush: a refusal means that requests still run, so it is worth waiting a few seconds."""


class EngineLoad(msgspec.Struct, frozen=True):
    """GET /v1/loads: what an engine is busy with; None where it doesn't tell. Field names are SGLang's."""

    num_running_reqs: int | None = None
    num_waiting_reqs: int | None = None
    gen_throughput: float | None = None
    """Sampled tokens per second, lately."""
    token_usage: float | None = None
    """Share of the KV cache that is in use."""


class _Loads(EngineLoad, frozen=True):
    loads: list[EngineLoad] = msgspec.field(default_factory=list[EngineLoad])
    """One a data-parallel rank; servers without /v1/loads tell at the top."""

    def summed(self) -> EngineLoad:
        """Of all ranks."""
        ranks = self.loads or [self]
        usage = [rank.token_usage for rank in ranks if rank.token_usage is not None]
        return EngineLoad(
            _sum([rank.num_running_reqs for rank in ranks]),
            _sum([rank.num_waiting_reqs for rank in ranks]),
            _sum([rank.gen_throughput for rank in ranks]),
            max(usage, default=None),
        )


class ModelInfo(msgspec.Struct, frozen=True):
    """GET /model_info: which model the engine serves, at which weights."""

    model_path: str
    weight_version: str | int = "default"
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    """Stays what it was where an update from disk has changed the other names to its folder."""
    model_type: str | None = None
    architectures: list[str] | None = None

    @property
    def version(self) -> int:
        """The weight version as a number, 0 before the first update."""
        return version_number(self.weight_version)


class _Verdict(msgspec.Struct, frozen=True):
    """What every call of the weight session answers, whatever its status code."""

    success: bool
    message: str = ""


class _CheckerRank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _CheckerAnswer(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""
    ranks: list[_CheckerRank] = msgspec.field(default_factory=list[_CheckerRank])


class EngineClient:
    """One engine, seen from the trainer. Not for several threads at once: each makes its own.

    Raises, in every method, EngineError with the URL, what was expected and what came; the calls of the weight session
    raise WeightSyncError where the engine refuses.
    """

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._http = HttpConnection(self.url, timeout_s)
        self._routes: frozenset[str] | None = None

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connection back."""
        self._http.close()

    # State

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """Which model at which weights. Cheap: also the readiness probe."""
        response = self._http.call_ok("GET", "/model_info", repeatable=True, timeout_s=timeout_s)
        return self._http.decode(response, ModelInfo)

    def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether the engine generates a token within the time: more than that it answers, and slower to ask."""
        try:
            return self._http.call("GET", "/health", timeout_s=timeout_s).ok
        except EngineError:
            return False

    def server_info(self) -> dict[str, Any]:
        """The engine's settings and load, as it reports them."""
        return self._http.decode(self._http.call_ok("GET", "/server_info", repeatable=True), dict[str, Any])

    @property
    def routes(self) -> frozenset[str]:
        """Every path of /openapi.json, read once: what this generation of the protocol knows."""
        if self._routes is None:
            response = self._http.call_ok("GET", "/openapi.json", repeatable=True)
            self._routes = frozenset(self._http.decode(response, dict[str, Any]).get("paths", ()))
        return self._routes

    @property
    def has_weight_session(self) -> bool:
        """Whether an update needs begin and end around it (SGLang since 0.5.21)."""
        return "/begin_weight_update" in self.routes

    def wait_ready(self, deadline_s: float, alive: Callable[[], None] | None = None) -> ModelInfo:
        """Polls /model_info (not /health, which generates) until the engine answers.

        `alive` is called before each try and raises when there is nothing left to wait for.

        Raises:
            EngineError: no answer by the deadline, with the last failure.
        """
        end = time.monotonic() + deadline_s
        while True:
            if alive is not None:
                alive()
            try:
                return self._http.decode(self._http.call_ok("GET", "/model_info", timeout_s=1.0), ModelInfo)
            except EngineError as error:
                if time.monotonic() >= end:
                    raise EngineError(f"The engine did not get ready within {deadline_s:g} s: {error}") from None
            time.sleep(0.1)

    def load(self, *, timeout_s: float | None = None) -> EngineLoad:
        """What the engine is busy with, as far as it tells: SGLang before /v1/loads tells little."""
        path = "/v1/loads" if "/v1/loads" in self.routes else "/server_info"
        response = self._http.call_ok("GET", path, repeatable=timeout_s is None, timeout_s=timeout_s)
        return self._http.decode(response, _Loads).summed()

    def tokens_per_s(self, load: EngineLoad) -> float | None:
        """How fast the engine samples. SGLang's load says so only with --enable-metrics, its internal state always."""
        states: list[dict[str, Any]] = [] if load.gen_throughput else self.server_info().get("internal_states") or []
        if not states or not load.num_running_reqs:  # what the internal state tells is the last busy moment's
            return load.gen_throughput
        return _sum([state.get("last_gen_throughput") for state in states])

    def queue_lengths(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """`running` and `waiting` requests, as far as the engine tells."""
        load = self.load(timeout_s=timeout_s)
        queues = {"running": load.num_running_reqs, "waiting": load.num_waiting_reqs}
        return {word: number for word, number in queues.items() if number is not None}

    # Requests in flight

    def pause(self, mode: PauseMode) -> None:
        """Stops generation. retract: running requests wait in the queue, and go on later, recomputed by new weights."""
        self._http.call_ok("POST", "/pause_generation", {"mode": mode}, repeatable=True)

    def continue_(self) -> None:
        """Lets generation go on; harmless where it was not paused."""
        self._http.call_ok("POST", "/continue_generation", {}, repeatable=True)

    def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all: each answers with what it has and finish_reason abort."""
        self._http.call_ok(
            "POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid}, repeatable=True
        )

    def flush_cache(self) -> None:
        """Drops all cached keys and values, so that nothing computed by old weights is read again.

        Raises:
            EngineError: requests kept running for as long as the back-off lasts; with the engine's queue lengths.
        """
        refusal = ""
        for wait_s in (0.0, *FLUSH_WAITS_S):
            time.sleep(wait_s)
            response = self._http.call("POST", "/flush_cache", {}, repeatable=True)
            if response.ok:
                return
            refusal = error_message(response.content)
        raise EngineError(
            f"{self.url}/flush_cache: refused {len(FLUSH_WAITS_S) + 1} times over {sum(FLUSH_WAITS_S):.1f} s, because "
            f"requests still run ({_in_words(self.queue_lengths())}). It said: {refusal} "
            "Pause with mode retract, or wait for the requests to end."
        )

    # Weight session

    def begin_weight_update(self) -> None:
        """Opens the session that an update needs. Raises: WeightSyncError where one is open already."""
        self._expect_success("/begin_weight_update", {"selector": "all"})

    def update_from_tensor(self, update: WeightUpdateFromTensor, *, timeout_s: float | None = None) -> None:
        """Hands over one bucket; the tensors behind it must live until this returns. Raises: WeightSyncError."""
        self._expect_success("/update_weights_from_tensor", to_body(update), timeout_s=timeout_s)

    def update_from_disk(self, update: WeightUpdateFromDisk, *, timeout_s: float | None = None) -> None:
        """Makes the engine read a Hugging Face folder. Raises: WeightSyncError."""
        self._expect_success("/update_weights_from_disk", to_body(update), timeout_s=timeout_s)

    def end_weight_update(self) -> None:
        """Closes the session. Raises: WeightSyncError where none is open."""
        self._expect_success("/end_weight_update", {})

    # Memory

    @property
    def can_release_memory(self) -> bool:
        """Whether the engine was started so that it can give GPU memory back (SGLang: --enable-memory-saver)."""
        return bool(self.server_info().get("enable_memory_saver"))

    def release_memory(self, *tags: MemoryTag) -> None:
        """Gives the GPU memory behind `tags` back. Their contents are lost. Nothing may be running."""
        self._http.call_ok("POST", "/release_memory_occupation", {"tags": tags})

    def resume_memory(self, *tags: MemoryTag) -> None:
        """Takes it again; weights hold anything until the next update."""
        self._http.call_ok("POST", "/resume_memory_occupation", {"tags": tags})

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """The first `truncate_size` rows of a parameter as nested lists of float32, None where the engine can't tell.

        SGLang tells for Llama only; for other architectures use `weights_checksum`.
        """
        body = {"name": name, "truncate_size": truncate_size}
        response = self._http.call("POST", "/get_weights_by_name", body, repeatable=True)
        return self._http.decode(response, list[Any]) if response.ok else None

    def weights_checksum(self) -> dict[str, str]:
        """{parameter name: 16 hex digits} of every tensor the engine holds, under the engine's own (fused) names."""
        response = self._http.call("POST", "/weights_checker", {"action": "checksum"}, repeatable=True)
        answer = self._http.decode(response, _CheckerAnswer)
        if not answer.success or len(answer.ranks) != 1:
            raise EngineError(
                f"{self.url}/weights_checker: expected checksums of one rank, got {len(answer.ranks)}: {answer.message}"
            )
        return answer.ranks[0].checksums

    # Scoring

    def score(
        self, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int], temperature: float
    ) -> list[list[float]]:
        """Prefill rescoring: logprobs (nats) of the tokens after each prompt, of logits / temperature, nothing sampled.

        The cache is flushed first, so that every key and value comes from the weights of now.

        Raises:
            EngineError: the answer doesn't cover the tokens, or the engine can't score at this temperature.
        """
        if temperature != 1.0 and "parameters" not in self.server_info():
            raise EngineError(
                f"{self.url}: SGLang reports logprobs of given tokens at temperature 1 only, expected {temperature:g}. "
                "Set rollout.temperature to 1 to rescore with it."
            )
        self.flush_cache()
        return [self._score_one(ids, start, temperature) for ids, start in zip(sequences, prompt_lens, strict=True)]

    def _score_one(self, token_ids: Sequence[int], prompt_len: int, temperature: float) -> list[float]:
        request = GenerateRequest(
            input_ids=list(token_ids),
            sampling_params=SamplingParams(max_new_tokens=0, temperature=temperature),
            return_logprob=True,
            logprob_start_len=prompt_len - 1,
        )
        response = self._http.call_ok("POST", "/generate", to_body(request), repeatable=True)
        (answer,) = decode_answers(response.content)
        num_scored = len(token_ids) - prompt_len
        entries = answer.meta_info.input_token_logprobs[-num_scored:] if num_scored else []
        last = max(token_ids, default=0)
        # SGLang computes on the vocabulary's last id and calls it 0.
        named = [
            last if entry[1] == 0 and sent == last else entry[1]
            for entry, sent in zip(entries, token_ids[prompt_len:], strict=False)
        ]
        if named != list(token_ids[prompt_len:]):
            raise EngineError(
                f"{self.url}/generate: expected input_token_logprobs of {num_scored} tokens from {prompt_len} on, "
                f"got {len(entries)} for other ids"
            )
        return [float(entry[0]) for entry in entries if entry[0] is not None]

    # Inside

    def _expect_success(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """The session's calls answer `success` in the body, with 200 as well as with 400: both are read."""
        response = self._http.call("POST", path, body, timeout_s=timeout_s)
        try:
            verdict = self._http.decode(response, _Verdict)
        except NanoRLError:
            verdict = _Verdict(False, f"{response.status_code}: {error_message(response.content)}")
        if not (verdict.success and response.ok):
            raise WeightSyncError(f"{self.url}{path}: the engine refused: {verdict.message or 'no reason given'}")


def _sum(values: Sequence[Number | None]) -> Number | None:
    told = [value for value in values if value is not None]
    return sum(told[1:], start=told[0]) if told else None


def _in_words(queues: dict[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in queues.items()) or "the engine tells no queue lengths"
