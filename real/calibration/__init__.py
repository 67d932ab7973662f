"""What `real.calibrate` is made of: measuring on all ranks, and deriving a cluster from what was measured."""
