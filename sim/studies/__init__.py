"""Questions over many runs: which policy is fastest, what a sweep shows, what to buy, what changed."""
