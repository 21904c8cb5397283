"""Committed facts in SQL. `models` are the tables, `database` commits groups of writes, the rest are statements by noun."""
