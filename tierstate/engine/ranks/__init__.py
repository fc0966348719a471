"""Many ranks that save and restore one version together: the team that they are, their saves, their restores."""
