"""Prompt attention for Hopper with a role for each warp."""
