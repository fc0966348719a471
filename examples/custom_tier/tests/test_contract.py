"""The contract of a tier: every promise and any history, also through a second handle on the same file."""

from tierstate_sqlite import SqliteTier

from tierstate.tiers.testing import TierContract


class TestSqliteTier(TierContract):
    def make(self, tmp_path):
        return SqliteTier(path=tmp_path / "ckpt.db")

    def reopen(self, tier):
        return SqliteTier(path=tier.path)
