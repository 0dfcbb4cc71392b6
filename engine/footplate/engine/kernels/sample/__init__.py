"""Choosing tokens on the device: arg-max and draws over a whole vocabulary, without a sort."""
