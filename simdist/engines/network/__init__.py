"""Transfers in flight share resources max-min fairly, as a fluid."""
