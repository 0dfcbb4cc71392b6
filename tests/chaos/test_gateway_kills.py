"""Gateways are killed while they stream, fifty times over: nothing stays reserved after its lease.

GATEWAY_KILLS sets the number of kills.
"""

from __future__ import annotations

import os

import pytest

from tests.deployments.gateways import launch, running_gateways
from tests.deployments.test_gateway_replicas import LEASE, QUOTA, kill_midstream
from tests.tenancy.limiter.valkey_server import running_valkey

KILLS = int(os.environ.get("GATEWAY_KILLS", "50"))


def test_no_reservation_outlives_the_lease_of_a_killed_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"step_s": 0.01, "limits": LEASE}
    with (
        running_valkey("--appendonly", "yes") as valkey,
        running_gateways(2, valkey.url, QUOTA, **options) as gateways,
    ):
        for number in range(KILLS):
            kill_midstream(valkey, gateways)
            with capsys.disabled():
                print(f"kill {number + 1}/{KILLS}: the next call passed", flush=True)
            gateways[:] = [gateways[1], *launch(1, valkey.url, QUOTA, **options)]
