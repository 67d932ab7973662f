"""Reads NFS without a mount: an fsspec file system on the C library libnfs 4."""
