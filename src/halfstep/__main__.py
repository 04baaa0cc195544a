"""``python -m halfstep`` is ``halfstep``."""

import sys

from halfstep._tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
