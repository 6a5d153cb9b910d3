"""Shift by one, checked: does a row of prediction space train exactly the tokens that were sampled?

A response of R tokens after a prompt of P sits at [P-1 : P+R-1] of the prediction space, exactly R long: there the mask
is set, the targets are the sampled ids and the logprobs the engine's; nowhere else is the mask set.
"""

from collections.abc import Sequence


def slice_faults(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_logprobs: Sequence[float],
    *,
    target_ids: Sequence[int],
    loss_mask: Sequence[bool],
    rollout_logprobs: Sequence[float],
) -> list[str]:
    """What is wrong with one row; empty where all is right.

    Args:
        prompt_ids: [P] what the engine was sent.
        response_ids: [R] what it returned.
        response_logprobs: [R] nats.
        target_ids: [T] the row, padded to the batch's width.
        loss_mask: [T] where the loss looks.
        rollout_logprobs: [T] nats, 0.0 where masked.
    """
    start, stop = len(prompt_ids) - 1, len(prompt_ids) + len(response_ids) - 1
    inside = [i for i, is_set in enumerate(loss_mask) if is_set]
    faults: list[str] = []
    if inside != list(range(start, stop)):
        found = f"[{inside[0]} : {inside[-1] + 1}], {len(inside)} set" if inside else "nothing"
        faults.append(f"the mask should be [{start} : {stop}], {stop - start} set; it is {found}")
    if list(target_ids[start:stop]) != list(response_ids):
        faults.append(f"the targets in [{start} : {stop}] are not the sampled ids")
    if list(target_ids[:start]) != list(prompt_ids[1:]):
        faults.append(f"the targets before {start} are not the prompt's ids")
    if list(rollout_logprobs[start:stop]) != list(response_logprobs):
        faults.append(f"the logprobs in [{start} : {stop}] are not the engine's")
    if any(rollout_logprobs[:start]) or any(rollout_logprobs[stop:]):
        faults.append(f"there are logprobs outside [{start} : {stop}]")
    return faults
