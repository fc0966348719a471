"""Publish: encode chunks, write packs, create the record, and copy later what waits in the backlog of a tier."""
