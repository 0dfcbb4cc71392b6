"""PostgreSQL: tables, migrations and the store."""
