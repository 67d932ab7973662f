"""Profiler traces of a real training job, read into the parts of a scenario.

Data flows one way: files (`kineto`) -> one rank's steps (`ranks`) -> the job (`job`) -> a scenario (`writing`).
"""
