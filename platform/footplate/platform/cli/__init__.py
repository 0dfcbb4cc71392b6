"""Commands that speak to a running platform over HTTP only."""
