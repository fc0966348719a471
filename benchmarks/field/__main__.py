"""The work of papers and of MLPerf Storage, one after the other: python -m benchmarks.field [--path DIR]."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("mlperf", "end_to_end", "kills", "layouts")


def main() -> int:
    """Run all, each with its defaults; 1 where one has failed."""
    commands = [[sys.executable, "-m", f"benchmarks.field.{name}", *sys.argv[1:]] for name in MODULES]
    return int(any([subprocess.run(command, check=False).returncode for command in commands]))


if __name__ == "__main__":
    sys.exit(main())
