"""`nanorl probe-tito`: are the tokens that will be trained exactly the tokens that were sampled, for this model?

Four questions, each answered alone: what would re-encoding break (drift), does the batch train what was sampled
(slices), does the chat template leave history alone (prefixes), and does the engine use the ids that it is sent (HTTP).
"""

import contextlib
import copy
import os
import tempfile
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nanorl.config import Config
from nanorl.data import build_data
from nanorl.engine.client import EngineClient
from nanorl.engine.connection import HttpConnection
from nanorl.engine.protocol import SamplingParams
from nanorl.errors import ConfigError, DataError, TokenizationError
from nanorl.loops.engine import EngineHandle, acquire_engine
from nanorl.loops.probe_checks import Check, ProbeResult, Turn, check_slices, check_stored, random_turns
from nanorl.loops.probe_engine import PER_PROMPT, check_appended, require_model, sample_turns
from nanorl.loops.probe_view import show
from nanorl.loops.resolve import resolve
from nanorl.models.presets import ResolvedModel
from nanorl.tokens import drift
from nanorl.tokens.chat import ChatFormat, load_chat, load_tokenizer
from nanorl.tokens.probe import probe_template
from nanorl.tokens.template import MARK, USER, ChatTemplate
from nanorl.tracking.view import View

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RANDOM_LENGTH = 8
"""Ids in a random sequence."""


def probe_tito(
    config: Config, view: View, *, num_samples: int = 256, use_engine: bool = True, template_file: Path | None = None
) -> ProbeResult:
    """Probes the configured model's tokens and shows what was found.

    Args:
        config: decides model, engine, prompts and seed.
        view: where header, progress and tables go.
        num_samples: sequences of each kind.
        use_engine: False: tokenizer and template alone; the model's weights need not be there.
        template_file: a chat template to try in the place of the model's own.

    Raises:
        ModelError: no model, no tokenizer, no chat template.
        EngineError: no engine at the URL, or one that serves another model.
        ConfigError: the template file can't be read.
    """
    header = {"model": config.model.name, "engine": "none"}
    model = None
    if use_engine or config.model.name in {"auto", "tiny"}:
        config, model = resolve(config, view.progress)
        header["model"] = model.name
    tokenizer = load_tokenizer(model.path if model else config.model.name)
    if template_file is not None:
        tokenizer.chat_template = _read(template_file)
        header["template"] = str(template_file)
    turns: list[Turn] = []
    checks: list[Check] = []
    if use_engine and model is not None:
        with (
            tempfile.TemporaryDirectory(prefix="nanorl-probe-") as folder,
            acquire_engine(config, model, Path(folder) / "engine.log", f"probe-tito {os.getpid()}") as engine,
        ):
            view.header({**header, "engine": engine.description, "dtype": str(config.model.dtype)})
            turns, checks = _probe_engine(config, model, engine, tokenizer, num_samples, view)
    else:
        view.header(header)
    result = ProbeResult(
        drift=_measure_drift(tokenizer, turns, num_samples, config.run.seed, view),
        checks=(*_check_types(tokenizer, turns, num_samples, config.run.seed), *checks),
        template=probe_template(cast("drift.Tokenizer", tokenizer)),
    )
    show(result, view)
    return result


def _measure_drift(
    tokenizer: "PreTrainedTokenizerFast", turns: Sequence[Turn], num_samples: int, seed: int, view: View
) -> tuple[drift.DriftReport, ...]:
    """The model's own sequences, random ids, and real text that was cut somewhere."""
    probed = cast("drift.Tokenizer", tokenizer)
    view.progress("decoding the vocabulary", 0, 0)
    kinds = {
        "random printable ids": drift.random_sequences(drift.printable_ids(probed), num_samples, RANDOM_LENGTH, seed),
        "random ids, bytes too": drift.random_sequences(drift.learned_ids(probed), num_samples, RANDOM_LENGTH, seed),
        "text cut in two": drift.spliced_sequences(probed, num_samples, seed),
    }
    if turns:
        kinds = {"sampled by the model": [list(turn.completion.token_ids) for turn in turns], **kinds}
    return tuple(drift.measure_drift(probed, kind, sequences) for kind, sequences in kinds.items())


def _check_types(
    tokenizer: "PreTrainedTokenizerFast", sampled: Sequence[Turn], num_samples: int, seed: int
) -> list[Check]:
    """Samples and batches, over what the engine answered and over turns of random ids and lengths."""
    turns = [*sampled, *random_turns(sorted(set(tokenizer.get_vocab().values())), num_samples, seed)]
    return [check_stored(turns), check_slices(turns)]


def _probe_engine(
    config: Config,
    model: ResolvedModel,
    engine: EngineHandle,
    tokenizer: "PreTrainedTokenizerFast",
    num_samples: int,
    view: View,
) -> tuple[list[Turn], list[Check]]:
    """Samples as training does, then sends everything back with a second turn's suffix."""
    with EngineClient(engine.url) as client:
        require_model(client.model_info(), model)
    chat = ChatFormat(copy.deepcopy(tokenizer), load_chat(model.path).stop_token_ids)  # perhaps another template
    per_prompt = min(PER_PROMPT, num_samples)
    prompts = build_data(config.data, config.run.seed).next(ceil(num_samples / per_prompt))
    prompt_ids = [chat.render(prompt.messages) for prompt in prompts]
    room = engine.context_length - max(map(len, prompt_ids))
    if room < 1:
        raise DataError(
            f"The longest prompt leaves no room for a response in a context of {engine.context_length} tokens."
        )
    sampling = SamplingParams(
        max_new_tokens=min(config.rollout.max_new_tokens or room, room),
        temperature=config.rollout.temperature,
        n=per_prompt,
        stop_token_ids=list(chat.stop_token_ids),
        sampling_seed=config.run.seed,
        skip_special_tokens=False,
        no_stop_trim=True,
    )
    with contextlib.closing(HttpConnection(engine.url, config.engine.request_timeout_s)) as http:
        turns, answered = sample_turns(
            http, prompt_ids, sampling, lambda done: view.progress("sampling", done, len(prompts) * per_prompt)
        )
        longer = [_extended(turn, _suffix(tokenizer)) for turn in turns]
        fitting = [ids for ids in longer if len(ids) < engine.context_length]
        last_id = len(tokenizer) - 1
        appended = check_appended(
            http, fitting, last_id, lambda done: view.progress("sending back", done, len(fitting))
        )
    return turns, [answered, appended]


def _suffix(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """The ids between a sampled turn and the next one, its end-of-turn token included."""
    template = ChatTemplate(cast("drift.Tokenizer", tokenizer))
    again = [USER, {"role": "assistant", "content": MARK}, {"role": "user", "content": "Are you sure?"}]
    try:
        text = template.render_messages(again, add_generation_prompt=True)
    except TokenizationError:  # a template of one turn; the template's own check says so
        text = MARK
    return template.encode(text.rpartition(MARK)[2])


def _extended(turn: Turn, suffix: Sequence[int]) -> list[int]:
    """What was sent, what was sampled, what follows; the end-of-turn token comes once, sampled or not."""
    sampled = turn.completion.token_ids
    return [*turn.prompt_ids, *sampled, *(suffix[1:] if sampled[-1:] == tuple(suffix[:1]) else suffix)]


def _read(template_file: Path) -> str:
    try:
        return template_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a chat template in {template_file}: {error}") from None
