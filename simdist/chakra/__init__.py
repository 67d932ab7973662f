"""Chakra execution traces: plans exported for simulators of networks and chips."""
