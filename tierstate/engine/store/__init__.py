"""One run in one tier: its newest record, indexes, retention, leases, and the chunks that can be reused."""
