"""Restores by many ranks: agreement on the version, exchange of chunks between ranks, and stragglers."""
