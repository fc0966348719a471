"""Compare what is locked with a database of known vulnerabilities (OSV), if it can be reached: `make audit`."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

DATABASE = "https://api.osv.dev/v1/query"
LOCKS = sorted(Path(__file__).parent.glob("*.txt"))


def reached() -> str:
    """Why the database cannot be reached; empty if it can."""
    question = urllib.request.Request(DATABASE, b'{"package": {"name": "pip", "ecosystem": "PyPI"}}')
    try:
        urllib.request.urlopen(question, timeout=10).close()
    except (OSError, urllib.error.URLError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if why := reached():
        print(f"audit: skipped, since {DATABASE} cannot be reached ({why})")
        sys.exit(0)
    root = Path(__file__).resolve().parents[1]
    subprocess.run(["make", "--no-print-directory", ".venv-tools/ready"], cwd=root, check=True)
    program = str(root / ".venv-tools/bin/pip-audit")
    options = ["--vulnerability-service", "osv", "--disable-pip", "--no-deps", "--progress-spinner", "off"]
    found = [subprocess.run([program, *options, "--requirement", str(lock)], check=False).returncode for lock in LOCKS]
    sys.exit(max(found))
