"""python -m benchmarks.fusion_study."""

import sys

from benchmarks.fusion_study.study import main

# Processes of the study import this file, too.
if __name__ == "__main__":
    sys.exit(main())
