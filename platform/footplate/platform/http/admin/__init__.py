"""The admin API under `/admin/v1`, and `/v1/me`."""
