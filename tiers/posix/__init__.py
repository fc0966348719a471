"""POSIX file systems: directory, NVMe and Lustre tiers, direct I/O with io_uring or threads."""
