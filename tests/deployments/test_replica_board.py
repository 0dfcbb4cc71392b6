"""What a gateway knows of a prompt when the number of replicas changes."""

from __future__ import annotations

from pathlib import Path

from tests.deployments.test_channel import asynchronous, until
from tests.deployments.test_inference_client import PROMPT, asked, fleet_of


@asynchronous
async def test_what_the_last_replica_holds_is_known_after_the_other_has_gone(tmp_path: Path) -> None:
    """The expected hit rate has no hole after a kill, and the replacement finds who holds what."""
    async with fleet_of(tmp_path, 2) as fleet:
        holder, other = fleet.replicas
        holder.cache(PROMPT[:480], b"tenant")
        await until(lambda: fleet.knows(holder, 30))
        await other.outlet.close()
        await until(lambda: len(fleet.board.links("m")) == 1)
        decision = fleet.board.decide("m", asked("r"))
        assert decision.is_matched
        assert [ranked.num_cached_tokens for ranked in decision.ranks] == [480]


@asynchronous
async def test_a_replica_that_was_always_alone_costs_no_hashing(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        decision = fleet.board.decide("m", asked("r"))
        assert not decision.is_matched and not decision.new_keys
        assert len(decision.ranks) == 1
