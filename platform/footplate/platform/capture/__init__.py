"""Opt-in capture of prompts and answers: whether, redacted, into a store of their own."""
