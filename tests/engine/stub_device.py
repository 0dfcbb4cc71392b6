"""A device without tensors: it keeps a digest of the prefix in each KV slot, and refuses a wrong one.

A slot written for position p holds the digest of tokens[: p + 1]. Before a token is computed, every earlier
slot of its block table must hold the digest of just that prefix. So a block shared, copied, evicted, reused
or written at the wrong time fails the step that reads it. The next token is a pure function of digest and
seed, which makes the oracle of a request one loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.types import EngineRequest, TokenLogprob
from footplate.engine.validation import choice_seed

EOS = 7


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()


def draw(tokens: Sequence[int], seed: int, vocab_size: int) -> int:
    return (
        int.from_bytes(hashlib.blake2b(digest(tokens) + str(seed).encode(), digest_size=4).digest())
        % vocab_size
    )


def oracle(request: EngineRequest, index: int, vocab_size: int, limit: int) -> list[int]:
    """The output ids of one choice run alone, stop rules applied."""
    params, seed = request.params, choice_seed(request.params.seed or 0, index)
    tokens = list(request.prompt_token_ids)
    out: list[int] = []
    while len(out) < limit:
        out.append(draw(tokens + out, seed, vocab_size))
        ends = out[-1] in params.stop_token_ids or (out[-1] == EOS and not params.ignore_eos)
        if ends and len(out) >= params.min_tokens:
            break
    return out


class StubDevice:
    """Runs scheduler outputs; `tokens_computed` counts work, for tests of prefix hits."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.kv: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_size, self.vocab_size = block_size, vocab_size
        self.rows: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.tokens_computed = 0

    def run(self, output: SchedulerOutput) -> StepResult:
        for source, target in output.copies:
            self.kv[target] = list(self.kv[source])
        for new in output.new_rows:
            self.rows[new.row] = list(new.token_ids)
            self.tables[new.row] = list(new.block_table)
            self.seeds[new.row] = new.params.seed or 0
            self.prompts[new.row] = new.num_prompt
        result = StepResult(output.step, {})
        for row in output.rows:  # all writes of a step come before its reads, as in a layer on the device
            self.tables[row.row] += row.new_blocks
            for position in range(row.start, row.start + row.num_tokens):
                self._slot(row.row, position, digest(self.rows[row.row][: position + 1]))
        for row in output.rows:
            tokens = self.rows[row.row]
            end = row.start + row.num_tokens
            assert len(tokens) >= end, "a token that does not exist was scheduled"
            for position in range(end):
                held = self._slot(row.row, position)
                assert held == digest(tokens[: position + 1]), f"row {row.row} reads a wrong KV at {position}"
            prompt_positions = range(row.start, min(end, self.prompts[row.row] - 1))
            result.prompt_logprobs[row.sequence_id] = [
                TokenLogprob(tokens[p + 1], -float(p + 1), 1) for p in prompt_positions
            ]
            self.tokens_computed += row.num_tokens
            if row.samples:
                assert end == len(tokens), "a draw before all known tokens are computed"
                token = draw(tokens, self.seeds[row.row], self.vocab_size)
                tokens.append(token)
                result.tokens[row.sequence_id] = token
                result.logprobs[row.sequence_id] = TokenLogprob(token, -1.0, 1)
        return result

    def _slot(self, row: int, position: int, value: bytes | None = None) -> bytes | None:
        block = self.kv[self.tables[row][position // self.block_size]]
        if value is not None:
            block[position % self.block_size] = value
        return block[position % self.block_size]
