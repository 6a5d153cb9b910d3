"""Every error nanorl raises on purpose: one class per boundary, one root to catch them all.

A message says what was expected, what came and what to do. The CLI prints it without a traceback and exits with code 2.
"""


class NanoRLError(Exception):
    """Root of all errors that nanorl raises on purpose."""


class ConfigError(NanoRLError):
    """A flag, a config key or a combination of them makes no sense."""


class ModelError(NanoRLError):
    """A model folder or id can't be found, loaded, or lacks a tokenizer or chat template."""


class DataError(NanoRLError):
    """A data file or task can't be read, or a prompt doesn't fit."""


class TokenizationError(NanoRLError):
    """Token ids and text disagree: a template rewrote history, a tokenizer answered something unexpected."""


class RewardError(NanoRLError):
    """A reward function raised, hung, or answered something that is no finite number."""


class BatchError(NanoRLError):
    """Samples can't be made into tensors: lengths, masks or shapes disagree."""


class EngineError(NanoRLError):
    """The engine doesn't answer, answers with an error, died, or serves something else than expected."""


class WeightSyncError(NanoRLError):
    """The engine refused a weight update, or holds other weights than the trainer afterwards."""


class SessionError(NanoRLError):
    """A multi-turn session was used against its rules."""


class CheckpointError(NanoRLError):
    """A checkpoint or run folder is missing, half written, corrupt, or belongs to another run."""


class TrackerError(NanoRLError):
    """A metrics backend can't be imported or started."""
