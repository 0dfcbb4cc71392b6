"""Models that administrators add, change and remove while the platform runs."""
