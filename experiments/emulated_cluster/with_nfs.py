"""Run a module whose URLs may be `nfs://...`: `python with_nfs.py real RUN --data nfs://HOST/EXPORT/path`."""

import runpy
import sys

from nfs_client.filesystem import register

if __name__ == "__main__":
    register()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
