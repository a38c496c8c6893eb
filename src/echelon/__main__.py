"""`python -m echelon` is the command line."""

import sys

from echelon.cli import main

sys.exit(main())
