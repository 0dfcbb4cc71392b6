"""Which replica and which model answer a request: pure decisions over views of the replicas."""
