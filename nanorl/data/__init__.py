"""Where prompts come from. `build_data` makes the source that the config names."""

from nanorl.config import ArithmeticData, JsonlData
from nanorl.data.prompts import PromptStream

__all__ = ["PromptStream", "build_data"]


def build_data(section: ArithmeticData | JsonlData, seed: int) -> PromptStream:
    """The training stream, with its held-out prompts beside it.

    Raises:
        DataError: the source can't be read.
    """
    if isinstance(section, ArithmeticData):
        from nanorl.data.arithmetic import ArithmeticTask

        return ArithmeticTask(seed)
    from nanorl.data.jsonl import read_jsonl, split_heldout

    prompts = read_jsonl(section.path)
    train, heldout = (
        (prompts, read_jsonl(section.heldout_path)) if section.heldout_path else split_heldout(prompts, section.path)
    )
    return PromptStream(train, seed, heldout)
