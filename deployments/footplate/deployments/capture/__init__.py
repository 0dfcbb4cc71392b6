"""Kept prompts and answers in PostgreSQL, and what writes and deletes them in one gateway."""
