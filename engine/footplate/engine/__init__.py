"""Footplate's inference engine: sequences, KV blocks, device tensors and the step loop.

Importing this package imports no torch: the gateway and the policy tests use its torch-free parts.
"""
