"""Copying whole KV blocks in all layers at once."""
