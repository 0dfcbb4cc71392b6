"""Servers that these tests share."""

from __future__ import annotations

from tests.billing.conftest import new_books

__all__ = ["new_books"]
