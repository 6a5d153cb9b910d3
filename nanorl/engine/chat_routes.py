"""/v1/chat/completions: OpenAI's chat over the same generation."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from nanorl.engine.answers import decode_texts, partial_answer
from nanorl.engine.generation_routes import Generator
from nanorl.engine.intake import Refusal, decode
from nanorl.engine.protocol import ChatRequest, FinishInfo, GenerateRequest, SamplingParams
from nanorl.engine.responses import json_response, sse
from nanorl.engine.sequence import EngineSequence

_DEFAULT_MAX_TOKENS = 128


def chat_router(generator: Generator, served_name: str) -> APIRouter:
    """The one route."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        chat = decode(await http.body(), ChatRequest)
        body = _to_generate(chat, generator.tokenizer)
        model = chat.model or served_name
        if chat.stream:
            generator.check(body)
            return StreamingResponse(_chunks(generator, body, http, model), media_type="text/event-stream")
        sequences, _ = await generator.complete(body, http)
        return json_response(_completion(sequences, chat, generator.tokenizer, model))

    return router


def _to_generate(chat: ChatRequest, tokenizer: Any) -> GenerateRequest:
    """The prompt that the model's own template makes, and SGLang's names for the settings."""
    if chat.top_logprobs:
        raise Refusal("The embedded engine reports no top_logprobs; SGLang does.", 501)
    if not tokenizer.chat_template:
        raise Refusal("The model has no chat template: use /generate with input_ids.")
    prompt_ids: list[int] = tokenizer.apply_chat_template(
        [msgspec.to_builtins(message) for message in chat.messages],
        add_generation_prompt=True,
        return_dict=False,
        **chat.chat_template_kwargs,
    )
    return GenerateRequest(
        input_ids=list(prompt_ids),
        return_logprob=True,
        sampling_params=SamplingParams(
            max_new_tokens=chat.max_completion_tokens or chat.max_tokens or _DEFAULT_MAX_TOKENS,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            top_k=chat.top_k,
            min_p=chat.min_p,
            n=chat.n,
            ignore_eos=chat.ignore_eos,
            stop=chat.stop,
            stop_token_ids=chat.stop_token_ids,
            sampling_seed=chat.seed,
        ),
    )


def _completion(sequences: list[EngineSequence], chat: ChatRequest, tokenizer: Any, model: str) -> dict[str, Any]:
    texts = decode_texts(sequences, tokenizer)
    num_prompt, num_sampled = len(sequences[0].prompt_ids), sum(len(s.output_ids) for s in sequences)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": _token_logprobs(s, tokenizer)} if chat.logprobs else None,
                **_finish_fields(s.finish),
            }
            for i, (s, text) in enumerate(zip(sequences, texts, strict=True))
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
        "metadata": {"weight_version": sequences[0].weight_version},
    }


def _finish_fields(finish: FinishInfo | None) -> dict[str, Any]:
    return {"finish_reason": finish.type if finish else None, "matched_stop": finish.matched if finish else None}


def _token_logprobs(sequence: EngineSequence, tokenizer: Any) -> list[dict[str, Any]]:
    texts = tokenizer.batch_decode([[token] for token in sequence.output_ids])
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, logprob in zip(texts, sequence.output_logprobs, strict=True)
    ]


async def _chunks(generator: Generator, body: GenerateRequest, http: HttpRequest, model: str) -> AsyncIterator[bytes]:
    """Deltas of the text. A character whose bytes come in several tokens is held back until it is whole."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    sent: dict[int, int] = {}
    places: dict[int, int] = {}
    try:
        async for event in generator.stream(body, http):
            if not places:
                places = {id(s): i for i, s in enumerate(event.sequence.request.sequences)}
            index = places[id(event.sequence)]
            answer = partial_answer(event.sequence, event.count, event.finish, generator.tokenizer, with_logprobs=False)
            text = answer.text or ""
            whole = text if event.finish else text.rstrip("\ufffd")
            delta = {"role": "assistant", "content": whole[sent.get(index, 0) :]}
            sent[index] = max(sent.get(index, 0), len(whole))
            yield sse(
                head | {"choices": [{"index": index, "delta": delta, "logprobs": None, **_finish_fields(event.finish)}]}
            )
    except Refusal as refusal:
        yield sse({"error": {"message": str(refusal)}})
    yield sse(b"[DONE]")
