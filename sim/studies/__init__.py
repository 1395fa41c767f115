"""Questions over many runs: which of several policies is fastest, and by how much."""
