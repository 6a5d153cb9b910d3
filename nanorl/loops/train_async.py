"""`nanorl train-async`: the engine samples while the trainer trains. The loop is that of `train`, fed ahead."""

from nanorl.config import Config
from nanorl.errors import ConfigError
from nanorl.loops.build import build
from nanorl.loops.cores import shared_cores
from nanorl.loops.overlap import Overlap
from nanorl.loops.train import TrainResult, train, turn
from nanorl.tracking.view import View

MAX_RATIO = 10.0
"""A ratio that clipping lets rise further is as good as not clipped."""


def train_async(config: Config, view: View) -> TrainResult:
    """Samples ahead: at most `max_staleness` syncs lie between the weights that sampled and those that train.

    With max_staleness = 0 there is nothing to overlap: it submits as the synchronous loop does, to the same bits.

    Raises:
        NanoRLError: bad input, an engine or a producer that died, a wait that came to nothing. Everything started is
            stopped by then.
    """
    check_overlap(config)
    if config.overlap.max_staleness == 0:
        return train(config, view)
    with shared_cores(config.model.device), build(config, view) as run, Overlap(run) as source:
        return turn(run, source)


def check_overlap(config: Config) -> None:
    """Refuses what can't be trained on stale samples, or what no engine can do.

    Raises:
        ConfigError: with what to set instead.
    """
    if config.run.rollout_only:
        raise ConfigError(
            "rollout_only trains nothing, so there is nothing to overlap: use `nanorl train --rollout-only`."
        )
    if config.engine.colocate:
        raise ConfigError(
            "engine.colocate: an engine that samples while the trainer trains needs its memory. Use `nanorl train`."
        )
    if config.overlap.in_flight_update == "in-place":
        raise ConfigError(
            "in_flight_update = in-place: both engines, SGLang and nanorl's own, go on with keys and values of the old "
            "weights then, so that new tokens come from two models at once. Use retract, which computes them anew, or "
            "drain."
        )
    if config.overlap.max_staleness and 1.0 + config.algo.clip_high > MAX_RATIO:
        raise ConfigError(
            f"Stale samples need a clipped ratio: clip_high = {config.algo.clip_high:g} lets it rise to "
            f"{1.0 + config.algo.clip_high:g}. Set algo.clip_high to at most {MAX_RATIO - 1:g} (0.2 is usual); "
            "algo.correction = tis bounds the weight of stale samples besides."
        )
