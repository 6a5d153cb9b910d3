"""How many groups may be out at once: the bound on staleness, as counts alone. No clock, no lock, no thread."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Capacity:
    """Every group holds a slot from its submission until the engine holds weights that were trained on it.

    There are (max_staleness + 1) * groups_per_step slots. A group that is submitted at version v finds at most
    (max_staleness + 1) * groups_per_step - 1 others before it, and every step uses up groups_per_step of them. So it is
    trained on at version v + max_staleness at the latest, unless younger groups finish before it and overtake it: that
    is what the check at consumption is for.

        in_flight --finish--> ready --take--> training --synced--> (free)
                                +----discard-------------------> (free)
    """

    groups_per_step: int
    max_staleness: int
    steps_left: int
    """Steps that are not synced yet: near the end nothing is sampled that no step would use."""
    in_flight: int = 0
    """Submitted, not finished."""
    ready: int = 0
    """Finished, not used."""
    training: int = 0
    """Used by the step that runs; the engine doesn't hold its weights yet."""

    @property
    def limit(self) -> int:
        """How many slots there are now."""
        return min(self.max_staleness + 1, self.steps_left) * self.groups_per_step

    @property
    def room(self) -> int:
        """How many groups may be submitted now."""
        return max(0, self.limit - self.in_flight - self.ready - self.training)

    def submit(self) -> None:
        """A group takes a slot."""
        assert self.room > 0, "submitted beyond the capacity"
        self.in_flight += 1

    def finish(self) -> None:
        """A group is graded."""
        self.in_flight -= 1
        self.ready += 1

    def discard(self) -> None:
        """A finished group will not be used: its slot is free at once."""
        self.ready -= 1

    def take(self, num_groups: int) -> None:
        """A step begins to train on groups."""
        assert num_groups <= self.ready, "took more than there is"
        self.ready -= num_groups
        self.training += num_groups

    def synced(self) -> None:
        """The engine holds the step's weights: its groups' slots are free."""
        self.training = 0
        self.steps_left -= 1
