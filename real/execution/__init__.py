"""The executor of plans, its streams and its memory."""
