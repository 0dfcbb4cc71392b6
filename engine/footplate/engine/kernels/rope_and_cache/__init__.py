"""Split, per-head norm, rotation and KV write of one attention layer."""
