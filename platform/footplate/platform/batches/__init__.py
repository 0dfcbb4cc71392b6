"""Files and batches: what a batch may be, how its lines are run once, and how it ends. Knows no database."""
