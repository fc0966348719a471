"""The manifest of a checkpoint: leaves, chunks, versions, layouts and records, and the log that orders the records."""
