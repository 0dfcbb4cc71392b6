"""Device kernels. Each op is a folder with a plain PyTorch `reference.py` and one file per backend beside it."""
