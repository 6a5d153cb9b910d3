"""The composition root: a configuration becomes a running engine, a trainer, and everything between them.

Only this room knows all others. Whatever is started here is stopped here, in reverse order, also on errors and Ctrl-C.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanorl.config import Config
from nanorl.data import PromptStream, build_data
from nanorl.data.prompts import StreamState
from nanorl.engine.client import EngineClient
from nanorl.engine.generation import GenerationClient
from nanorl.errors import EngineError, RewardError, WeightSyncError
from nanorl.loops.engine import EngineHandle, acquire_engine, check_reach
from nanorl.loops.interrupts import deferred
from nanorl.loops.recorder import Recorder
from nanorl.loops.recovery import Recovery
from nanorl.loops.resolve import resolve
from nanorl.loops.resume import open_folder, restore
from nanorl.models.presets import ResolvedModel
from nanorl.rewards.hub import build_grader
from nanorl.rollout.runner import EventLoopThread
from nanorl.rollout.single_turn import SingleTurn
from nanorl.tokens.chat import load_chat
from nanorl.tracking.run_folder import RunFolder
from nanorl.tracking.trackers import require_backends
from nanorl.tracking.view import View
from nanorl.train.checkpoint import TrainState, list_checkpoints, save_checkpoint
from nanorl.train.model import load_policy
from nanorl.train.trainer import Trainer
from nanorl.types import Group, Prompt, StepReport
from nanorl.weight_sync.base import SyncReport, WeightSync
from nanorl.weight_sync.carriers import make_sync

PROGRESS_S = 2.0
"""A busy engine may take so long to tell how far it is; a hung one must not hold up whoever notices that."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything that a loop touches."""

    config: Config
    """Resolved: no field is open."""
    model: ResolvedModel
    folder: RunFolder
    view: View
    recorder: Recorder
    prompts: PromptStream
    heldout: Sequence[Prompt]
    rollout: SingleTurn
    event_loop: EventLoopThread
    trainer: Trainer
    engine: EngineHandle
    client: EngineClient
    sync: WeightSync
    recovery: Recovery
    data_position: Mapping[str, Any] = field(init=False)
    """Of the prompts after the last step that is done: those of a step that fails are not lost."""
    version: int = 0
    """The weights that the engine holds, or is being sent: how many syncs this run has made."""
    done_steps: int = 0
    """Loop steps that are done, in this process or before a resume."""
    saved_steps: int = 0
    """Those in the newest checkpoint."""
    is_whole: bool = True
    """Whether the trainer stands between two steps, so that it can be saved."""
    data_state: Callable[[], StreamState] = field(init=False)
    """Position of the data, for checkpoints; a producer that runs ahead has its own."""

    def __post_init__(self) -> None:
        self.data_state = self.prompts.state_dict
        self.data_position = dict(self.data_state())

    def sample(
        self,
        prompts: Sequence[Prompt],
        noise: int,
        *,
        group_size: int | None = None,
        temperature: float | None = None,
        what: str = "sampling",
    ) -> list[Group]:
        """Graded groups of the engine's current weights; `noise` and the run's seed decide the sampling.

        Group size and temperature are the training's where none is given.
        """
        size = group_size or self.group_size
        rollout = self.rollout if temperature is None else replace(self.rollout, temperature=temperature)
        watch = self._watch_sampling(what, len(prompts) * size)

        def collect() -> list[Group]:
            self.view.progress(what, 0, len(prompts) * size)
            work = rollout.collect(
                prompts,
                self.noise_seed(noise),
                size,
                lambda done, total: self.view.progress(what, done, total),
            )
            return self.event_loop.run(work, self.config.engine.request_timeout_s, watch)

        groups = self.recovery.attempt(collect, self.resend_weights)
        self.check_any_valid(groups)
        return groups

    def noise_seed(self, noise: int) -> int:
        """Apart for every run's seed and every number."""
        return self.config.run.seed * 1_000_000_007 + noise

    def _watch_sampling(self, what: str, total: int) -> Callable[[], None]:
        """Looks after the engine while it samples, and shows how many of its requests are done."""

        def watch() -> None:
            self.engine.check()
            queues: dict[str, int] = {}
            with contextlib.suppress(EngineError):  # for show only: the requests themselves find out what is wrong
                queues = self.client.queue_lengths(timeout_s=PROGRESS_S)
            if queues:
                self.view.progress(what, max(0, total - sum(queues.values())), total)

        return watch

    def sync_weights(self) -> SyncReport:
        """Makes the engine hold the trainer's weights, under the next version."""
        self.view.progress("syncing", 0, 0)
        self.version += 1

        def send() -> SyncReport:
            self.engine.check()
            report = self.sync.sync(self.trainer.named_tensors(), self.version)
            if self.config.sync.full_check:
                self.sync.verify(self.trainer.named_tensors())
            return report

        return self.recovery.attempt(send, self._renew_sync)

    def resend_weights(self) -> None:
        """Makes a restarted engine hold what the former one held: between two steps that is what the trainer has."""
        self._renew_sync()
        self.sync.sync(self.trainer.named_tensors(), self.version)

    def _renew_sync(self) -> None:
        """A restarted engine knows nothing of the carrier that the former one had opened."""
        self.sync.close()
        self.sync = _make_sync(self.config, self.client, self.trainer, self.folder)

    def log(self, report: StepReport, groups: Sequence[Group]) -> None:
        """Records a finished step, and keeps a checkpoint where one is due."""
        self.recorder.log(report, groups)
        self.done_steps, self.data_position = report.step, dict(self.data_state())
        every = 0 if self.config.run.rollout_only else self.config.run.checkpoint_every
        if every and (report.step % every == 0 or report.step == self.config.run.steps):
            self.save_checkpoint()

    def restore(self, checkpoint: Path) -> None:
        """Puts trainer, data and counts back; the engine has the weights after the next sync."""
        state = restore(checkpoint, self.trainer, self.prompts)
        self.done_steps = self.saved_steps = state.step
        self.version, self.data_position = state.weight_version - 1, state.data

    def save_checkpoint(self) -> None:
        """Keeps the run as it stands after the last step."""
        self.view.progress("saving a checkpoint", 0, 0)
        save_checkpoint(
            self.folder.path / "checkpoints",
            self.trainer,
            Path(self.model.path),
            TrainState(
                step=self.done_steps,
                weight_version=self.version,
                data=dict(self.data_position),
            ),
            keep=self.config.run.keep_checkpoints,
        )
        self.saved_steps = self.done_steps

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """From the first gradient to the checkpoint: Ctrl-C waits a few seconds for the end of the block."""
        with deferred():
            self.is_whole = False
            yield
            self.is_whole = True

    @contextlib.contextmanager
    def kept_on_interrupt(self) -> Iterator[None]:
        """A run that is interrupted between two steps leaves a checkpoint, unless it was to have none."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            if self.config.run.checkpoint_every and self.is_whole and self.done_steps > self.saved_steps:
                self.save_checkpoint()
            raise

    def check_any_valid(self, groups: Sequence[Group]) -> None:
        """Raises: RewardError, EngineError where not one sample is valid: more steps won't mend whatever it is."""
        samples = [sample for group in groups for sample in group.samples]
        if not samples or any(sample.is_valid for sample in samples):
            return
        first = samples[0].metadata
        error = first.get("error", "no reason given")
        reason = f"All {len(samples)} samples failed, also when sampled again. The first: {error}"
        if "cause" in first:
            raise RewardError(f"{reason} (in the reward: {first['cause']}).")
        raise EngineError(f"{reason} (in the engine).")

    @contextlib.contextmanager
    def kept_on_loss(self) -> Iterator[None]:
        """A run that ends because its engine is lost leaves a checkpoint of its last step, unless it was to have none.

        The block must leave the trainer as it was after the last step that was logged.
        """
        try:
            yield
        except (EngineError, WeightSyncError) as error:
            run = self.config.run
            if run.rollout_only or not run.checkpoint_every or not self.done_steps or not self.is_whole:
                raise
            if self.done_steps not in list_checkpoints(self.folder.path / "checkpoints"):
                self.save_checkpoint()
            raise type(error)(
                f"{error}\nThe run is kept as of step {self.done_steps}; with an engine again, go on with "
                f"--resume --run-dir {self.folder.path}"
            ) from None

    @property
    def prompts_per_step(self) -> int:
        """Groups a step."""
        return self.config.rollout.prompts_per_step or 1

    @property
    def group_size(self) -> int:
        """Samples a group."""
        return self.config.rollout.group_size or 1


@contextlib.contextmanager
def build(config: Config, view: View) -> Iterator[Run]:
    """Checks everything that can be checked cheaply, then starts the engine while the trainer's model loads.

    Raises:
        NanoRLError: bad input; nothing that was started is left behind.
    """
    with contextlib.ExitStack() as stack:
        require_backends(config.tracking)
        config, model = resolve(config, view.progress)
        chat = load_chat(model.path)
        prompts = build_data(config.data, config.run.seed)
        check_reach(config)
        grader = build_grader(config.reward)
        stack.callback(grader.close)
        folder, checkpoint = open_folder(config, model)
        stack.enter_context(folder)
        recorder = Recorder(config, folder, chat, view)
        stack.callback(recorder.close)
        engine, trainer = _start_both(stack, config, model, folder, view)
        if model.note:
            view.note(model.note)
        view.header(_header(config, model, engine, folder))
        event_loop = stack.enter_context(EventLoopThread())
        sampler = GenerationClient(engine.url, timeout_s=config.engine.request_timeout_s)
        stack.callback(lambda: event_loop.run(sampler.aclose(), timeout_s=10.0))
        client = stack.enter_context(EngineClient(engine.url))
        run = Run(
            config=config,
            model=model,
            folder=folder,
            view=view,
            recorder=recorder,
            prompts=prompts,
            heldout=prompts.heldout(config.run.eval_prompts),
            rollout=SingleTurn(
                sampler=sampler,
                chat=chat,
                grader=grader,
                rollout=config.rollout,
                algo=config.algo,
                temperature=config.rollout.temperature,
                context_length=engine.context_length,
            ),
            event_loop=event_loop,
            trainer=trainer,
            engine=engine,
            client=client,
            sync=_make_sync(config, client, trainer, folder),
            recovery=Recovery(engine, view, config.engine.max_restarts),
        )
        stack.callback(lambda: run.sync.close())  # noqa: PLW0108 the sync of then: a restart makes another
        if checkpoint:
            run.restore(checkpoint)
        # A server that another run has trained must give no false result: ours first, whoever started it.
        run.sync_weights()
        folder.keep()
        yield run


def _make_sync(config: Config, client: EngineClient, trainer: Trainer, folder: RunFolder) -> WeightSync:
    return make_sync(config.sync, client, trainer.policy.device, folder.path)


def _header(config: Config, model: ResolvedModel, engine: EngineHandle, folder: RunFolder) -> dict[str, str]:
    return {
        "model": model.name,
        "engine": engine.description,
        "device": config.model.device,
        "dtype": str(config.model.dtype),
        "run": str(folder.path),
    }


def _start_both(
    stack: contextlib.ExitStack, config: Config, model: ResolvedModel, folder: RunFolder, view: View
) -> tuple[EngineHandle, Trainer]:
    """The trainer's model loads on a thread while the engine starts in its own process.

    The engine is this thread's, since Ctrl-C comes here: while the engine starts, it is stopped at once, and nobody
    waits for the model.
    """
    view.progress("starting the engine, loading the model", 0, 0)
    pool = ThreadPoolExecutor(max_workers=1)
    stack.callback(pool.shutdown, wait=False)
    loading = pool.submit(make_trainer, config, model, folder)
    engine = stack.enter_context(acquire_engine(config, model, folder.engine_log, str(folder.path)))
    return engine, loading.result()


def make_trainer(config: Config, model: ResolvedModel, folder: RunFolder) -> Trainer:
    """The trainer of a resolved configuration, on its device, with the model's own weights."""
    torch.manual_seed(config.run.seed)
    device = torch.device(config.model.device)
    autocast = torch.bfloat16 if config.model.dtype == "bfloat16" else None
    policy = load_policy(model.path, device, config.rollout.temperature, autocast)
    return Trainer(policy, config.train, config.algo, config.run.seed, folder.path)
