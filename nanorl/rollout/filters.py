"""Which groups are worth training on."""

from nanorl.errors import RewardError
from nanorl.types import Group


def has_spread(group: Group) -> bool:
    """Whether the group's valid rewards differ: where they don't, every advantage is exactly 0.

    Source: dynamic sampling, DAPO (arXiv 2503.14476) section 3.2.
    """
    return len({sample.reward for sample in group.valid}) > 1


def nothing_passed(num_discarded: int, last: Group) -> RewardError:
    """The error of dynamic sampling whose filter lets nothing through."""
    rewards = [sample.reward for sample in last.valid]
    told = f"those of the last one are all {rewards[0]:g}" if rewards else "no sample of the last one was valid"
    return RewardError(
        f"Dynamic sampling discarded {num_discarded} groups, and no other came: the rewards within each are all the "
        f"same, {told}. The problems are too easy or too hard for this model, or the reward is constant. Change data "
        "or reward, raise group_size or temperature, or set rollout.dynamic_sampling = 0."
    )
