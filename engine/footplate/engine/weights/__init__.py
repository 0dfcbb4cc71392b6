"""Model sources: where weights and their description come from, and how a file's bytes become tensors."""
