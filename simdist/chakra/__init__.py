"""Chakra execution traces: plans exported for simulators of networks and chips, and traces imported as workloads."""
