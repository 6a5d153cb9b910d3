"""The types that travel the loop: Prompt -> Completion -> Sample -> Group -> StepReport.

Plain Python up to `Group`; tensors begin at `nanorl.train.batch.Batch`. Everything here is frozen, checked when it is
made, and free of torch. Letters: P prompt tokens, R response tokens, L = P + R, the whole sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from typing import Any, Literal, NamedTuple

from nanorl.errors import BatchError

Message = Mapping[str, Any]
"""One chat message in OpenAI's form: `{"role": "user", "content": "..."}`."""

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(StrEnum):
    """How a sample ended. Only COMPLETED and TRUNCATED samples carry a reward and train."""

    COMPLETED = "COMPLETED"
    TRUNCATED = "TRUNCATED"
    ABORTED = "ABORTED"
    FAILED = "FAILED"


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a sequence were sampled by the weights of `version`.

    In a `Completion` positions count response tokens (as the engine reports them), in a `Sample` the whole sequence.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy is asked, before any token exists."""

    id: str
    """Names the problem for good: the same problem has the same id in every epoch and run."""
    messages: tuple[Message, ...]
    """The conversation so far, as the chat template takes it."""
    label: str | None = None
    """The right answer, for rewards; None where a reward needs none."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine answered to one request: R sampled tokens, exactly as sampled."""

    token_ids: tuple[int, ...]
    """[R] sampled ids, the stop token included. Never made from text."""
    logprobs: tuple[float, ...]
    """[R] nats, log-softmax of logits / temperature in fp32, by the weights that sampled."""
    weight_versions: tuple[VersionSpan, ...]
    """Which weights sampled which response tokens; spans are in order and cover [0, R)."""
    finish_reason: FinishReason
    """stop: a stop token or string; length: the budget or context ended; abort: interrupted; error: no answer."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine already had."""
    error: str | None = None
    """Why there is no answer, with finish_reason error."""

    def __post_init__(self) -> None:
        """Raises: BatchError where lengths or spans disagree."""
        if len(self.logprobs) != len(self.token_ids):
            raise BatchError(
                f"A completion needs one logprob a token: {len(self.token_ids)} ids, {len(self.logprobs)} logprobs. "
                "Was return_logprob sent?"
            )
        _check_spans(self.weight_versions, 0, len(self.token_ids))

    def followed_by(self, rest: "Completion") -> "Completion":
        """This, interrupted, and what was sampled after it, as one: every token keeps its logprob and version."""
        shift = len(self.token_ids)
        return replace(
            rest,
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            weight_versions=self.weight_versions
            + tuple(VersionSpan(v, a + shift, b + shift) for v, a, b in rest.weight_versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence of a group: prompt and response, aligned token by token over the whole length L.

    >>> Sample(group_id="p0", index=0, token_ids=(5, 6, 7, 2), loss_mask=(False, False, True, True),
    ...        rollout_logprobs=(0.0, 0.0, -0.1, -0.7), weight_versions=(VersionSpan(3, 2, 4),),
    ...        status=Status.COMPLETED, finish_reason="stop", reward=1.0).num_sampled
    2
    """

    group_id: str
    """The id of the prompt that the group shares."""
    index: int
    """Place within the group, 0 <= index < group_size."""
    token_ids: tuple[int, ...]
    """[L] prompt ids, then what was sampled (and, in several turns, what the environment added)."""
    loss_mask: tuple[bool, ...]
    """[L] True exactly where the policy sampled the token; made from positions, never from comparing ids."""
    rollout_logprobs: tuple[float, ...]
    """[L] nats, the engine's logprob of each sampled token, 0.0 where nothing was sampled."""
    weight_versions: tuple[VersionSpan, ...]
    """Which weights sampled which positions of token_ids."""
    status: Status
    finish_reason: FinishReason
    reward: float | None = None
    """The scalar that trains; None until graded, and always None for FAILED and ABORTED."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the reward is made of, for the log: `{"correct": 1.0, "format": 1.0}`."""
    advantage: float = 0.0
    """Group-relative advantage of every sampled token; exactly 0.0 where the sample doesn't train."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Raises: BatchError where lengths disagree, a logprob is outside the mask, or a number isn't finite."""
        length = len(self.token_ids)
        for name in ("loss_mask", "rollout_logprobs"):
            if len(getattr(self, name)) != length:
                raise BatchError(f"{name} has {len(getattr(self, name))} entries for {length} token ids")
        if length and self.loss_mask[0]:
            raise BatchError("The first token of a sequence has no context to be sampled from: its loss_mask must be 0")
        if any(
            logprob != 0.0 and not sampled
            for sampled, logprob in zip(self.loss_mask, self.rollout_logprobs, strict=True)
        ):
            raise BatchError("rollout_logprobs must be 0.0 wherever loss_mask is 0")
        if self.reward is not None and not isfinite(self.reward):
            raise BatchError(f"A reward must be a finite number, got {self.reward}")
        if self.reward is not None and not self.is_valid:
            raise BatchError(f"A {self.status} sample has no reward, got {self.reward}: mask it, never score it")
        if not isfinite(self.advantage):
            raise BatchError(f"An advantage must be a finite number, got {self.advantage}")
        _check_spans(self.weight_versions, None, length)

    @property
    def is_valid(self) -> bool:
        """Whether the sample may be graded and trained on."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED)

    @property
    def num_sampled(self) -> int:
        """R: how many tokens the policy sampled."""
        return sum(self.loss_mask)

    @property
    def response_start(self) -> int:
        """P: position of the first sampled token; L where nothing was sampled."""
        return self.loss_mask.index(True) if True in self.loss_mask else len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled any token; staleness = trainer version - this."""
        return min((span.version for span in self.weight_versions), default=None)

    @classmethod
    def from_completion(cls, group_id: str, index: int, prompt_ids: Sequence[int], completion: Completion) -> "Sample":
        """Appends a completion to its prompt: ids as sampled, mask by position."""
        shift = len(prompt_ids)
        return cls(
            group_id=group_id,
            index=index,
            token_ids=(*prompt_ids, *completion.token_ids),
            loss_mask=(False,) * shift + (True,) * len(completion.token_ids),
            rollout_logprobs=(0.0,) * shift + completion.logprobs,
            weight_versions=tuple(VersionSpan(v, a + shift, b + shift) for v, a, b in completion.weight_versions),
            status=_STATUS_OF_FINISH[completion.finish_reason],
            finish_reason=completion.finish_reason,
            metadata={"error": completion.error} if completion.error else {},
        )

    def failed(self, cause: str, message: str) -> "Sample":
        """The same tokens, FAILED: masked from training, counted under `cause`."""
        metadata = {**self.metadata, "cause": cause, "error": message}
        return replace(self, status=Status.FAILED, reward=None, advantage=0.0, metadata=metadata)


_STATUS_OF_FINISH: Mapping[str, Status] = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
    "error": Status.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt: the unit within which rewards are compared."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        """Raises: BatchError where a sample belongs to another prompt."""
        for sample in self.samples:
            if sample.group_id != self.prompt.id:
                raise BatchError(f"Sample of group {sample.group_id!r} in the group of prompt {self.prompt.id!r}")

    @property
    def valid(self) -> tuple[Sample, ...]:
        """The members that are graded and trained on."""
        return tuple(sample for sample in self.samples if sample.is_valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step of the loop did, for trackers and the live view."""

    step: int
    """Counts from 1."""
    weight_version: int
    """The version that the engine holds after the step's sync."""
    metrics: Mapping[str, float]
    """`room/name[/stat]` -> number; docs/metrics.md has each formula and unit."""


def _check_spans(spans: Sequence[VersionSpan], start: int | None, end: int) -> None:
    """Spans must be in order, not overlap and end inside; with a `start` they must cover [start, end) without a gap."""
    position = start or 0
    for span in spans:
        if (
            span.start < position
            or (start is not None and span.start != position)
            or span.end < span.start
            or span.end > end
        ):
            raise BatchError(f"weight_versions must be ordered spans within [0, {end}), got {list(spans)}")
        position = span.end
    if start is not None and position != end:
        raise BatchError(f"weight_versions must cover all {end} tokens, got {list(spans)}")
