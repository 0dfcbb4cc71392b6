"""What the process that forks gateways does first: import what a gateway needs and load its tokeniser."""

from tests.deployments.gateway_process import pipeline

pipeline()
