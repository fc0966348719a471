"""The history of a run: the log of records, tags, leases, retention and the difference of two versions."""
