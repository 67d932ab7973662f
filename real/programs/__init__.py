"""Programs: what computes."""
