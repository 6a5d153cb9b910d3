"""The whole configuration: frozen sections, one a room.

A field that is None takes the model preset's default (`nanorl.models.presets`); the resolved configuration is saved as
JSON in the run folder. Unknown keys and values out of range fail with the nearest name and the path.
"""

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Seconds = PositiveFloat
Beta = Annotated[float, Meta(ge=0, lt=1)]
MIN_TEMPERATURE = 0.01
MAX_SEED = 2**31 - 1
MAX_STEPS = 10**9


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of every section: frozen, keyword-only, no unknown keys."""


class ModelConfig(Section, frozen=True):
    """Which policy is trained."""

    name: str = "auto"
    """`auto`, `tiny`, a Hugging Face id or a folder."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What the engine computes in; the trainer keeps fp32 weights and autocasts to this."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class ArithmeticData(Section, frozen=True, tag_field="type", tag="arithmetic"):
    """The built-in two-step arithmetic; train and held-out problems are disjoint."""


class JsonlData(Section, frozen=True, tag_field="type", tag="jsonl"):
    """One JSON object a line: prompt (text or messages), label, metadata."""

    path: str
    heldout_path: str | None = None
    """Held-out problems; None: the last tenth of `path`."""


DATA_TYPES = ("arithmetic", "jsonl")
REWARDS = ("arithmetic",)
"""Built in; `nanorl.rewards.hub` has the functions."""


class RewardConfig(Section, frozen=True):
    """Who grades."""

    name: str = "arithmetic"
    """A built-in reward or `module:function`."""
    timeout_s: Seconds = 10.0
    """A user's function that takes longer makes its sample FAILED."""
    num_workers: Positive | None = None
    """Processes that run a user's function at once; None: one a core, at most 4. More for one that waits."""

    def __post_init__(self) -> None:
        """Refuses what is neither."""
        module, _, function = self.name.partition(":")
        if self.name not in REWARDS and not (module and function):
            built_in = ", ".join(REWARDS)
            raise ValueError(
                f"reward.name: unknown reward {self.name!r}. Built in: {built_in}; your own: 'module:function'"
            )


class RolloutConfig(Section, frozen=True):
    """How the policy is sampled."""

    prompts_per_step: Positive | None = None
    group_size: Positive | None = None
    """G: samples a prompt, compared with each other."""
    max_new_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    max_retries: NonNegative = 2
    """How often a FAILED or ABORTED sample is sampled again before it is masked."""
    dynamic_sampling: NonNegative = 0
    """Replace groups whose rewards are all the same, until this many times prompts_per_step were discarded; 0: off."""

    def __post_init__(self) -> None:
        """Refuses what GRPO can't train on."""
        if self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature must be above 0, at least {MIN_TEMPERATURE}: greedy samples have no "
                "distribution to learn from"
            )
        if self.group_size == 1:
            raise ValueError(
                "rollout.group_size must be at least 2: the group advantage of a single sample is always 0"
            )


class AlgoConfig(Section, frozen=True):
    """Group advantages and the clipped policy loss (`nanorl.algo`)."""

    std: Literal["population", "sample", "none"] = "population"
    """What a group's rewards are divided by."""
    eps: PositiveFloat = 1e-6
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Upper bound of the loss factor where the advantage is negative; None: off."""
    reduction: Literal["token", "sample", "constant"] = "token"
    constant_length: Positive | None = None
    """What `constant` divides each sample by, in tokens; None: max_new_tokens."""
    correction: Literal["none", "tis", "mis", "icepop"] = "none"
    """none: one clipped ratio against the policy that sampled. Others: the decoupled form, with that bounded weight."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """Of mis: what a weight is computed over; None: sequence."""
    correction_mode: Literal["truncate", "mask"] | None = None
    """Of mis: what happens to a weight out of bounds; None: mask."""
    tis_cap: Annotated[float, Meta(ge=1)] | None = None
    """The highest weight of any correction; None: 2."""
    mask_low: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The lowest weight that icepop and a masking mis keep; None: 0.5 for icepop, 0 for mis."""

    def __post_init__(self) -> None:
        """Refuses settings that would have no effect."""
        if self.correction == "none" and self.tis_cap is not None:
            raise ValueError("tis_cap bounds the weights of a correction: set algo.correction to tis, mis or icepop")
        if self.correction != "mis" and (self.correction_level or self.correction_mode):
            raise ValueError("correction_level and correction_mode belong to algo.correction = mis")
        has_low = self.correction == "icepop" or (self.correction == "mis" and self.correction_mode != "truncate")
        if self.mask_low is not None and not has_low:
            raise ValueError("mask_low belongs to algo.correction = icepop, or mis with correction_mode = mask")


class TrainConfig(Section, frozen=True):
    """The optimizer and how a step's samples are cut."""

    lr: PositiveFloat | None = None
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegative = 0
    """Optimizer steps over which lr rises linearly from 0."""
    num_minibatches: Positive | None = None
    """Optimizer steps a loop step; the step's samples are split evenly."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens in one forward pass; changes memory, not gradients."""


class OverlapConfig(Section, frozen=True):
    """How far sampling runs ahead of training (`nanorl train-async`)."""

    max_staleness: NonNegative = 2
    """Syncs between the oldest weights that sampled a group and those that train on it; 0: as `nanorl train`."""
    stale: Literal["drop", "recycle"] = "recycle"
    """What happens to a group that got too old: forgotten, or its prompt is asked again."""
    in_flight_update: Literal["retract", "in-place", "drain"] = "retract"
    """Running requests during a sync: recomputed by the new weights, kept as they are, or waited for."""
    stall_timeout_s: Seconds = 300.0
    """So long without any finished group ends the run, with what it waited for."""


class EngineConfig(Section, frozen=True):
    """Who samples."""

    type: Literal["auto", "torch", "sglang"] = "auto"
    url: str | None = None
    """A running server; None: a live `nanorl serve` of the same model, else an own one."""
    flags: str = ""
    """Further flags of an own engine, as on its command line."""
    sglang_command: str | None = None
    """What starts SGLang where it lives in another environment; None: $NANORL_SGLANG, else this environment's."""
    max_restarts: NonNegative = 3
    """How often a run starts its own engine again after the engine died or hung."""
    colocate: bool = False
    """Lends the engine's GPU memory, weights and KV cache, to the trainer while it trains."""
    take_over: bool = False
    """Use a server although another run holds it."""
    start_timeout_s: Seconds = 300.0
    request_timeout_s: Seconds = 600.0

    def __post_init__(self) -> None:
        """Refuses what is no address of a server."""
        if self.url is None:
            return
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            is_url = False
        if not is_url:
            raise ValueError(f"engine.url: expected something like http://127.0.0.1:30000, got {self.url!r}")


class SyncConfig(Section, frozen=True):
    """How weights travel to the engine."""

    carrier: Literal["auto", "shared_memory", "cuda_ipc", "disk"] = "auto"
    bucket_mb: Positive | None = None
    """Splits a big model into several calls over a smaller buffer, in MB (10^6 bytes); None: one call."""
    full_check: bool = False
    """Compare every tensor by checksum after each sync, not only one."""


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 6
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    dir: str | None = None
    """The run folder; None: runs/<time>-<model>."""
    overwrite: bool = False
    rollout_only: bool = False
    """Sample and grade, train nothing."""
    replay: str | None = None
    """A run folder whose recorded rollouts are trained on, without an engine."""
    resume: str | None = None
    """`latest` or a step: go on in `dir` from that checkpoint."""
    checkpoint_every: NonNegative = 20
    """Loop steps between checkpoints, one at the end besides; 0: none at all."""
    keep_checkpoints: Positive = 2
    """How many of the newest stay."""
    eval_prompts: NonNegative = 256
    """Held-out prompts answered before and after training, once each at the training temperature; 0: none."""
    eval_every: NonNegative = 0
    """Steps between such evaluations during training; 0: none."""

    def __post_init__(self) -> None:
        """Refuses what contradicts itself."""
        if self.replay and self.rollout_only:
            raise ValueError(
                "run.replay trains on recorded samples, run.rollout_only samples and doesn't train: choose one"
            )
        if self.resume and self.resume != "latest" and not self.resume.isdecimal():
            raise ValueError(f"run.resume: expected `latest` or the step of a checkpoint, got {self.resume!r}")


class TrackingConfig(Section, frozen=True):
    """Where the numbers go besides metrics.jsonl (`nanorl.tracking`); each backend is an extra of the package."""

    backends: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = ()
    project: str = "nanorl"
    """W&B's project, MLflow's experiment."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline: files in the run folder, to be sent with `wandb sync`."""
    mlflow_uri: str | None = None
    """A folder or a tracking server; None: `mlruns` in the run folder."""
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 9464
    """Of /metrics on 127.0.0.1; 0 takes a free one."""
    rollouts: bool = True
    """Keep every step's samples under rollouts/: about 30 bytes a token, needed for `show` and replay."""


class Config(Section, frozen=True):
    """Everything that decides a run."""

    model: ModelConfig = ModelConfig()
    data: ArithmeticData | JsonlData = ArithmeticData()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    overlap: OverlapConfig = OverlapConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    tracking: TrackingConfig = TrackingConfig()
    run: RunConfig = RunConfig()
