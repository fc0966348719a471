"""Finding and repairing damage: verify, the search for undamaged chunks, rebuilt records, doctor."""
