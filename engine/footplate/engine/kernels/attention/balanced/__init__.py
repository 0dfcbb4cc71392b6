"""Decode attention whose keys are shared out evenly, whatever the rows' lengths."""
