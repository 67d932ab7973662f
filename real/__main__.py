"""`torchrun --nproc-per-node N -m real RUN`: perform the plan of a run directory for real.

If ranks go on when others fail (`failures.on_failure: continue`), `python -m real RUN` starts them.
"""

import os
import sys

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: a lost connection would print native stacks

from real.cli import main

if __name__ == "__main__":
    code = main()
    if code or "--replica" in sys.argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread may still be inside a collective that will never end, of a group that was left
