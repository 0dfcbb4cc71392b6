"""Products of few rows whose weights flow past all multiprocessors in equal shares."""
