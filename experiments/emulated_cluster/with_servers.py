"""Run a module whose URLs may be `nfs://...` or `sink://...`: `python with_servers.py real RUN --data nfs://HOST/PATH`."""

import runpy
import sys

import sink
from nfs_client import filesystem

if __name__ == "__main__":
    filesystem.register()
    sink.register()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
