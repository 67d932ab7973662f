"""The parts of `real.calibrate`: measuring on all ranks, and deriving a cluster from the measurements."""
