"""Restore: find the version, plan the reads, fetch and verify chunks, scatter them into the user's memory."""
