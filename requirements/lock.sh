#!/bin/sh
# Write the lock files: for each group of pyproject.toml the versions of constraints.txt, with hashes of all their files.
# usage: lock.sh UV
set -eu
uv=$1
for group in dev test fuzz bench integrations; do
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command "make lock" --constraint constraints.txt --excludes requirements/not-locked.in \
        --output-file "requirements/$group.txt" --group "$group" pyproject.toml requirements/torch.in
done
# 3.11.5: pymdown-extensions needs it.
for group in docs tools; do
    "$uv" pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate \
        --custom-compile-command "make lock" --constraint constraints.txt --output-file "requirements/$group.txt" --group "$group"
done
