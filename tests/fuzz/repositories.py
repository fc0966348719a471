"""Coverage-guided forgery of whole repositories: `make fuzz`.

    python tests/fuzz/repositories.py [-max_total_time=SECONDS] [CORPUS ...]

The input is the dice by which an object of a repository is changed, its checksums made right; then all that reads is
called (`support.hostile_repositories`). An answer that is neither right nor an error of ours ends the run, as do a file
that is opened outside of the tier, a pickle, more memory or more time. (libFuzzer by way of Atheris.)
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["tierstate"]):
    import tierstate  # noqa: F401

from support import hostile_repositories as hostile

LIMITS = ("-timeout=60", "-rss_limit_mb=4096", "-max_len=200", "-len_control=0")
SEEDS = 40


def main() -> None:
    """Fuzz, from random throws and whatever corpus is named."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "repository").mkdir()
        (place / "seeds").mkdir()
        for i in range(SEEDS):
            (place / "seeds" / str(i)).write_bytes(random.Random(i).randbytes(100))
        hostile.watch()
        repository = hostile.build(place / "repository")

        def one(data: bytes) -> None:
            hostile.tried(repository, place, hostile.Dice(data))

        atheris.Setup([*sys.argv, *LIMITS, str(place / "seeds")], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
