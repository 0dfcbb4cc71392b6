"""The limiter on Valkey."""
