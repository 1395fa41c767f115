"""What counts: it applies each decision to what is resident and hands the work to a machine."""
