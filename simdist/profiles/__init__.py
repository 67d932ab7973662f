"""Profiler traces of a real training job, read into what a scenario needs.

Data flows one way: files (`kineto`) -> one rank's steps (`ranks`) -> the job (`job`) -> a scenario (`writing`).
"""
