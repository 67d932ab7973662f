"""Profiler traces of a real training job, read into what a scenario needs.

Data flows one way: files -> events (`kineto`) -> one rank's steps (`steps`) -> the job (`job`) -> links, delays and
stragglers (`estimates`) -> a scenario (`importing`), which `writing` puts into files.
"""
