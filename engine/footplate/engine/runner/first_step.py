"""The first step of a loaded model: weights that were damaged on their way show in what it computes.

Files say how many bytes they hold, not which: a download that was cut short leaves zeros, a bad disk any
bits. Bits that leave all numbers finite are not found.
"""

from __future__ import annotations

import math

from footplate.engine.core import Runner
from footplate.engine.errors import LoadError
from footplate.engine.plan import NewRow, ScheduledRow, SchedulerOutput
from footplate.engine.types import SamplingParams

NUM_TOKENS = 4
_MEND = "a weight file is damaged; fetch it again and compare its checksum"


def refuse_damaged(runner: Runner, vocab_size: int, block_size: int, max_len: int) -> None:
    """Compute the token after a short prompt. Must run before the runner's first real step; keeps nothing.

    Raises:
        LoadError: the logits are no numbers, or all the same.
    """
    count = min(NUM_TOKENS, max_len)
    tokens = tuple(token % vocab_size for token in range(1, count + 1))
    blocks = tuple(range(-(-count // block_size)))
    row = NewRow(0, tokens, count, SamplingParams(temperature=0.0, logprobs=0), blocks)
    step = SchedulerOutput(-1, (ScheduledRow(0, 0, 0, count, samples=True),), (row,))
    logprob = runner.run(step).logprobs[0].logprob
    if not math.isfinite(logprob):
        raise LoadError(f"the weights give no numbers in the model's first step: {_MEND}")
    if vocab_size > 1 and abs(logprob + math.log(vocab_size)) < 1e-6:
        raise LoadError(f"the weights give every token the same chance in the model's first step: {_MEND}")
