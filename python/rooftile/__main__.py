# SPDX-License-Identifier: Apache-2.0
"""`python -m rooftile` is the command `rooftile`."""

import sys

from rooftile.cli import main

sys.exit(main())
