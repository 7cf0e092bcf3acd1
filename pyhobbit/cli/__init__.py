# SPDX-License-Identifier: MIT
"""The command line, a module per verb; `pyhobbit convert` lies in pyhobbit.convert."""
