"""The versions of a run as its user sees them: tags, forks, copies to other tiers, comparison, history of leaves."""
