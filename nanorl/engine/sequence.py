"""What the engine works on: sequences (one sampled continuation each) and the HTTP request that waits for them."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from nanorl.engine.protocol import FinishInfo, ReportedSpan, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One HTTP call: all its sequences, and whom to tell. Callbacks run on the engine's thread and must be quick."""

    on_done: Callable[["Request", str | None], None]
    """Called once: when the last sequence has finished, or with the reason why the engine died."""
    on_progress: Callable[["EngineSequence"], None] | None = None
    """Streaming: called after every sampled token, and when the sequence has finished."""
    sequences: list["EngineSequence"] = field(default_factory=list["EngineSequence"])
    num_open: int = 0
    """Sequences that have not finished."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One continuation of one prompt: a row of the batch while it runs, plain lists while it waits or has finished."""

    rid: str
    prompt_ids: list[int]
    """[P] token ids."""
    params: SamplingParams
    seed: int
    """Seeds this sequence's own noise (int64)."""
    request: Request
    arrival: int = 0
    """Place in the order of arrival, which decides who runs first; given by the engine."""
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    score_from: int | None = None
    """Position from which the prompt is scored; None: not at all."""

    output_ids: list[int] = field(default_factory=list[int])
    """[R] sampled ids that have left the batch's tensors: all of them once finished."""
    output_logprobs: list[float] = field(default_factory=list[float])
    """[R] nats, aligned with output_ids."""
    spans: list[ReportedSpan] = field(default_factory=list[ReportedSpan])
    """Which weights sampled which tokens of output_ids."""
    input_logprobs: list[float | None] = field(default_factory=list[float | None])
    """[P - score_from] nats; the first has no context and is None."""
    cached_tokens: int = 0
    num_retractions: int = 0
    finish: FinishInfo | None = None
    weight_version: str = "default"
    """The weights at the time it finished."""

    @property
    def prefix(self) -> list[int]:
        """Everything that must be in the KV cache before the next token: prompt and what was sampled so far."""
        return self.prompt_ids + self.output_ids if self.output_ids else self.prompt_ids

    @property
    def max_tokens(self) -> int:
        """The most positions of the KV cache that it can ever need."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    def append(self, token_ids: Items[int], logprobs: Items[float], version: str) -> None:
        """Takes sampled tokens over from the batch; `version` sampled all of them."""
        if not token_ids:
            return
        start = len(self.output_ids)
        self.output_ids += token_ids
        self.output_logprobs += logprobs
        end = len(self.output_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = ReportedSpan(version, self.spans[-1].start, end)
        else:
            self.spans.append(ReportedSpan(version, start, end))
