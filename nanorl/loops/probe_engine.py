"""Token in, token out over HTTP: does the engine compute on exactly what it was sent, and return all it sampled?"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from nanorl.engine.client import ModelInfo
from nanorl.engine.connection import HttpConnection
from nanorl.engine.protocol import (
    GenerateAnswer,
    GenerateRequest,
    SamplingParams,
    decode_answers,
    to_body,
    to_completion,
)
from nanorl.errors import EngineError
from nanorl.loops.probe_checks import Check, Turn
from nanorl.models.presets import ResolvedModel
from nanorl.tokens.prefix import common_length

BATCH = 8
"""Prompts in one request."""
PER_PROMPT = 8
"""Samples of each."""

Progress = Callable[[int], None]
"""Called with how many sequences are done."""


def require_model(info: ModelInfo, model: ResolvedModel) -> None:
    """Raises: EngineError where the engine serves another model than the one whose tokenizer is probed."""
    served = [name for name in (info.tokenizer_path, info.model_path, info.served_model_name) if name]
    wanted = {model.name, model.path}
    if wanted & set(served) or Path(model.path).resolve() in {Path(name).resolve() for name in served}:
        return
    raise EngineError(
        f"The engine serves {served[0]}, but the tokens to be probed are those of {model.name}. Pass --model "
        f"{served[0]}, or the URL of an engine that serves {model.name}."
    )


def sample_turns(
    http: HttpConnection, prompts: Sequence[Sequence[int]], sampling: SamplingParams, on_progress: Progress
) -> tuple[list[Turn], Check]:
    """Samples `sampling.n` answers a prompt, and checks each answer against its prompt and itself.

    Raises:
        EngineError: the engine refuses or doesn't answer.
    """
    turns: list[Turn] = []
    faults: list[str] = []
    for start in range(0, len(prompts), BATCH):
        batch = [list(prompt) for prompt in prompts[start : start + BATCH]]
        sent = [prompt for prompt in batch for _ in range(sampling.n)]
        request = GenerateRequest(input_ids=list(batch), sampling_params=sampling, return_logprob=True)
        for prompt, answer in zip(sent, generate(http, request, len(sent)), strict=True):
            faults += [f"answer {len(turns)}: {fault}" for fault in answer_faults(prompt, answer)]
            turns.append(Turn(tuple(prompt), to_completion(answer)))
        on_progress(len(turns))
    return turns, Check("the engine counts the prompt and returns every sampled id", len(turns), tuple(faults))


def check_appended(
    http: HttpConnection, prompts: Sequence[Sequence[int]], last_id: int, on_progress: Progress
) -> Check:
    """Sends prompt + sampled + suffix as the next prompt; the engine must name those ids and no others.

    `last_id` is the tokenizer's highest.
    """
    faults: list[str] = []
    for start in range(0, len(prompts), BATCH):
        batch = [list(prompt) for prompt in prompts[start : start + BATCH]]
        request = GenerateRequest(
            input_ids=list(batch),
            sampling_params=SamplingParams(max_new_tokens=1),
            return_logprob=True,
            logprob_start_len=0,
        )
        for i, (prompt, answer) in enumerate(zip(batch, generate(http, request, len(batch)), strict=True), start):
            faults += [f"prompt {i}: {fault}" for fault in prompt_faults(prompt, answer, last_id)]
        on_progress(start + len(batch))
    return Check("prompt + sampled + suffix comes back id for id", len(prompts), tuple(faults))


def generate(http: HttpConnection, request: GenerateRequest, num_expected: int) -> list[GenerateAnswer]:
    """One request's answers, whole: a `Completion` no longer knows what the engine counted.

    Raises:
        EngineError: another number of answers, or none.
    """
    answers = decode_answers(http.call_ok("POST", "/generate", to_body(request), repeatable=True).content)
    if len(answers) != num_expected:
        raise EngineError(f"{http.url}/generate: expected {num_expected} answers, got {len(answers)}")
    return answers


def answer_faults(prompt_ids: Sequence[int], answer: GenerateAnswer) -> list[str]:
    """Where an answer contradicts its prompt or itself."""
    meta = answer.meta_info
    ids = [entry[1] for entry in meta.output_token_logprobs]
    faults: list[str] = []
    if meta.prompt_tokens != len(prompt_ids):
        faults.append(f"{len(prompt_ids)} prompt ids were sent, the engine counts {meta.prompt_tokens}")
    if answer.output_ids != ids:
        faults.append(f"output_ids {answer.output_ids[:8]} are not the ids of output_token_logprobs {ids[:8]}")
    if meta.completion_tokens != len(ids):
        faults.append(f"the engine counts {meta.completion_tokens} sampled tokens, {len(ids)} have a logprob")
    return faults


def prompt_faults(prompt_ids: Sequence[int], answer: GenerateAnswer, last_id: int) -> list[str]:
    """Where the engine names other ids than were sent.

    SGLang writes 0 for the vocabulary's last id and all above, which it takes for images; it computes on the id sent.
    """
    used = [entry[1] for entry in answer.meta_info.input_token_logprobs]
    faults: list[str] = []
    if answer.meta_info.prompt_tokens != len(prompt_ids):
        faults.append(f"{len(prompt_ids)} ids were sent, the engine counts {answer.meta_info.prompt_tokens}")
    sent = [
        0 if sent >= last_id and named == 0 else sent for sent, named in zip_longest(prompt_ids, used, fillvalue=-1)
    ]
    if used != sent:
        faults.append(f"from position {common_length(used, sent)} on the engine names other ids than were sent")
    return faults
