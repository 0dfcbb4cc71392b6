"""What the composition root asks of Ray."""

from __future__ import annotations

import pytest

from footplate.deployments.serve_platform import gpu_share, model_application
from footplate.deployments.specs import ModelSpec, ReplicaSpec
from footplate.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("config", "num_gpus", "want"),
    [
        (EngineConfig(), 0, 0.0),
        (EngineConfig(), 8, 0.9),
        (EngineConfig(gpu_memory_utilization=0.45), 1, 0.45),
        (EngineConfig(device="cuda"), 1, 0.9),
        (EngineConfig(device="cpu"), 8, 0.0),
    ],
)
def test_a_replica_books_the_share_of_a_gpu_whose_memory_it_takes(
    config: EngineConfig, num_gpus: float, want: float
) -> None:
    assert gpu_share(config, num_gpus) == want
    spec = ReplicaSpec(ModelSpec("m", "dummy:/config.json", config), "/key")
    application = model_application(spec, num_gpus=num_gpus)
    assert (application._bound_deployment.ray_actor_options.get("num_gpus") or 0.0) == want
