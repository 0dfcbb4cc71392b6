"""The device side of a step: batch preparation, the forward pass and sampling."""
