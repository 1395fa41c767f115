"""What measures and predicts the comparisons in `reports/validation` anew."""
