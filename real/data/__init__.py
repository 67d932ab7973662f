"""Data sets: files on a server, copies of them on a node's disk, decoded samples in its memory, batches for a rank."""
