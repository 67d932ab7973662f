"""Logs of other programs: how often training was interrupted, by what, and how long each part of a recovery took."""
