"""Blocks written for Hopper's bulk copies and asynchronous tensor cores."""
