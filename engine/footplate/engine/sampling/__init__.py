"""Choosing the next token, defined once in torch for CPU and CUDA."""
