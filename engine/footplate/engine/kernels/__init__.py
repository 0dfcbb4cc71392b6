"""Device kernels. Each op is a folder with a plain PyTorch `reference.py`, and kernels beside it."""
