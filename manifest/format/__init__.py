"""The stored form: tables, leaves, versions, layouts and records, as values and as checked bytes."""
