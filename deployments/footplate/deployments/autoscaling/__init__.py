"""How many replicas a model has: a pure policy, and its place in Ray Serve."""
