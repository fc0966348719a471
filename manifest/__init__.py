"""What was saved: leaves, chunks, versions, layouts, records, and the log that orders them."""
