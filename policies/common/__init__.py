"""What several policies are made of: caches in order, placements, predictors, and rules on a gate's scores."""
