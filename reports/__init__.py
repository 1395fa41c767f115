"""Tables and figures as pure functions of the tidy tables a run writes."""
