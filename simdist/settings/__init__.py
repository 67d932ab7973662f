"""Strict values with units: the base of everything that a user writes."""
