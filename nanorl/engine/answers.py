"""From finished (or streaming) sequences to the bodies of answers. Runs on the HTTP server's thread."""

from collections.abc import Sequence as Items
from typing import Any

from nanorl.engine.protocol import FinishInfo, GenerateAnswer, MetaInfo, ReportedSpan, TokenLogprob
from nanorl.engine.sequence import EngineSequence


def answers_of(sequences: Items[EngineSequence], tokenizer: Any, *, with_logprobs: bool) -> list[GenerateAnswer]:
    """One answer a finished sequence."""
    texts = decode_texts(sequences, tokenizer)
    return [
        GenerateAnswer(
            text=text, output_ids=s.output_ids, meta_info=_meta(s, len(s.output_ids), with_logprobs, s.finish)
        )
        for s, text in zip(sequences, texts, strict=True)
    ]


def partial_answer(
    sequence: EngineSequence, count: int, finish: FinishInfo | None, tokenizer: Any, *, with_logprobs: bool
) -> GenerateAnswer:
    """The first `count` tokens of a sequence that may still run; text and ids are cumulative, as SGLang streams."""
    ids = sequence.output_ids[:count]
    return GenerateAnswer(
        text=_trim(tokenizer.decode(_text_ids(ids, sequence, finish), **_decoding(sequence)), sequence, finish),
        output_ids=ids,
        meta_info=_meta(sequence, count, with_logprobs, finish),
    )


def decode_texts(sequences: Items[EngineSequence], tokenizer: Any) -> list[str]:
    """The text of each sequence, without the stop that ended it unless the request wants it."""
    texts: dict[int, str] = {}
    for skips in (True, False):
        chosen = [s for s in sequences if s.params.skip_special_tokens is skips]
        if not chosen:  # transformers 5.17 decodes no sequence at all to one empty text
            continue
        decoded = tokenizer.batch_decode(
            [_text_ids(s.output_ids, s, s.finish) for s in chosen], skip_special_tokens=skips
        )
        texts |= {id(s): _trim(text, s, s.finish) for s, text in zip(chosen, decoded, strict=True)}
    return [texts[id(s)] for s in sequences]


def _decoding(sequence: EngineSequence) -> dict[str, bool]:
    return {"skip_special_tokens": sequence.params.skip_special_tokens}


def _text_ids(ids: list[int], sequence: EngineSequence, finish: FinishInfo | None) -> list[int]:
    stopped = finish is not None and isinstance(finish.matched, int)
    return ids[:-1] if stopped and not sequence.params.no_stop_trim else ids


def _trim(text: str, sequence: EngineSequence, finish: FinishInfo | None) -> str:
    if finish is None or not isinstance(finish.matched, str):
        return text
    found = text.find(finish.matched)
    if found < 0:
        return text
    return text[: found + len(finish.matched)] if sequence.params.no_stop_trim else text[:found]


def _meta(sequence: EngineSequence, count: int, with_logprobs: bool, finish: FinishInfo | None) -> MetaInfo:
    spans = [ReportedSpan(s.version, s.start, min(s.end, count)) for s in sequence.spans if s.start < count]
    spans = spans or [ReportedSpan(sequence.weight_version, 0, 0)]
    outputs: list[TokenLogprob] = []
    if with_logprobs:
        outputs = [
            (lp, i, None) for lp, i in zip(sequence.output_logprobs[:count], sequence.output_ids[:count], strict=True)
        ]
    first = len(sequence.prompt_ids) - len(sequence.input_logprobs)
    return MetaInfo(
        id=sequence.rid,
        finish_reason=finish,
        prompt_tokens=len(sequence.prompt_ids),
        completion_tokens=count,
        cached_tokens=sequence.cached_tokens,
        weight_version=sequence.weight_version if finish else spans[-1].version,
        weight_versions=spans,
        num_retractions=sequence.num_retractions,
        input_token_logprobs=[
            (lp, i, None) for lp, i in zip(sequence.input_logprobs, sequence.prompt_ids[first:], strict=True)
        ],
        output_token_logprobs=outputs,
    )
