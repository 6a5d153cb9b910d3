"""Many generations in flight: asynchronous, over httpx, decoded with msgspec.

A request that the engine refuses (a prompt that is too long) is a Completion with finish_reason "error": the others of
its batch go on. An engine that doesn't answer at all is an EngineError.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from nanorl.engine.connection import RETRY_WAITS_S, error_message
from nanorl.engine.protocol import GenerateAnswer, GenerateRequest, SamplingParams, decode_answers, to_completion
from nanorl.errors import EngineError
from nanorl.types import Completion


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The engine answered, but not with a generation: 4xx, or 500 for this request."""

    message: str


class GenerationClient:
    """One engine, seen from the rollout. Belongs to the event loop that first uses it.

    Generation has no effect on the engine, so every transport fault may be retried; a request with a seed gives the
    same tokens again.

    Args:
        url: where the engine listens.
        timeout_s: how long one request may take, queueing included. A hung engine shows only by this.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # an engine is a peer: proxies from the environment would only get in the way
        )

    async def __aenter__(self) -> "GenerationClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections; requests still in flight are cut off."""
        await self._http.aclose()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """One call per request, all at once; the completions of each request (n of them) in order, one after another.

        Raises:
            EngineError: the engine doesn't answer.
        """
        answers = await asyncio.gather(*(self._generate_one(request) for request in requests))
        return [completion for completions in answers for completion in completions]

    async def generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """All prompts in one call, so that their batch is the same in every run; n completions of each, in order.

        Args:
            prompt_ids: [prompts][P] token ids.
            sampling: one a prompt.

        Raises:
            EngineError: the engine doesn't answer, or answers another number of completions.
        """
        batch = GenerateRequest(
            input_ids=[list(ids) for ids in prompt_ids], sampling_params=list(sampling), return_logprob=True
        )
        answers = await self._post(batch)
        if isinstance(answers, _Refusal):
            # One bad prompt fails a whole batch: ask for each alone, so that it fails alone.
            singles = [
                GenerateRequest(input_ids=list(ids), sampling_params=params, return_logprob=True)
                for ids, params in zip(prompt_ids, sampling, strict=True)
            ]
            return list(await asyncio.gather(*(self._generate_one(single) for single in singles)))
        completions = iter(
            to_completion(answer) for answer in self._checked(answers, sum(params.n for params in sampling))
        )
        return [[next(completions) for _ in range(params.n)] for params in sampling]

    async def _generate_one(self, request: GenerateRequest) -> list[Completion]:
        params = request.sampling_params
        n = params.n if isinstance(params, SamplingParams) else sum(p.n for p in params)
        answers = await self._post(request)
        if isinstance(answers, _Refusal):
            return [_failed(answers.message)] * n
        return [to_completion(answer) for answer in self._checked(answers, n)]

    def _checked(self, answers: list[GenerateAnswer], expected: int) -> list[GenerateAnswer]:
        if len(answers) != expected:
            raise EngineError(f"{self.url}/generate: expected {expected} completions, got {len(answers)}")
        return answers

    async def _post(self, request: GenerateRequest) -> list[GenerateAnswer] | _Refusal:
        """One POST /generate, repeated after transport faults and 503."""
        body = msgspec.json.encode(request)
        fault = ""
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                response = await self._http.post(
                    self.url + "/generate", content=body, headers={"Content-Type": "application/json"}
                )
                if response.status_code == httpx.codes.OK:
                    return decode_answers(response.content)
                if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return _Refusal(f"{response.status_code}: {error_message(response.content)}")
                fault = f"503: {error_message(response.content)}"
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                # Repeating would wait as long again for an engine that is most likely hung.
                raise EngineError(
                    f"{self.url}/generate: no answer within {self.timeout_s:g} s. It is hung, paused or overloaded."
                ) from None
            except httpx.TransportError as error:
                fault = f"{type(error).__name__}: {error}"
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        raise EngineError(
            f"{self.url}/generate: no answer in {len(RETRY_WAITS_S) + 1} tries ({fault}). Is the engine still running?"
        )


def _failed(message: str) -> Completion:
    return Completion(token_ids=(), logprobs=(), weight_versions=(), finish_reason="error", error=message)
