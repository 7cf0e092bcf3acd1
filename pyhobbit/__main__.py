# SPDX-License-Identifier: MIT
import sys

from pyhobbit.cli.main import main

sys.exit(main())
