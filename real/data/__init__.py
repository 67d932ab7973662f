"""Data sets: files on a server, copies on a node's disk, decoded samples in its memory, batches for a rank."""
