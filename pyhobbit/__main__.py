# SPDX-License-Identifier: MIT
import sys

from pyhobbit.cli import main

sys.exit(main())
