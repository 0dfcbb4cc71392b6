"""Model code: decoders put together from shared layers."""
