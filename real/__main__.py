"""`torchrun --nproc-per-node N -m real RUN`: perform the plan of a run directory for real."""

import sys

from real.cli import main

if __name__ == "__main__":
    sys.exit(main())
