"""Peer memory: the newest versions in tmpfs of this host, with copies in other hosts, so that a host may be lost."""
