"""Weights that multiply rows: dense in torch, or packed integer codes."""
