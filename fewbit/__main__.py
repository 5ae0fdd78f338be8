"""`python -m fewbit`."""

import sys

from fewbit.cli import main

sys.exit(main())
