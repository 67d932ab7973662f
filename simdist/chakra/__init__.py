"""Chakra execution traces: plans as what simulators of networks and chips read, and their traces as workloads."""
