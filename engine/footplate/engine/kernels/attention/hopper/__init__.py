"""Prompt attention written for Hopper's asynchronous tensor cores."""
