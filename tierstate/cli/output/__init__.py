"""The output of every command: a table or lines for people, or with ``--json`` the same result as JSON for machines."""
