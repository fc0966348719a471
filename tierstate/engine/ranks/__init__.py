"""Many ranks: team and heartbeats, two-phase commit, ownership of replicated shards, exchange of chunks in restores."""
