"""PostgreSQL: tables, migrations and the stores."""
