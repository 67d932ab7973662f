"""Estimates from the steps of a job: links, tensors, delays, stragglers."""
