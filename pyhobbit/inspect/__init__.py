# SPDX-License-Identifier: MIT
"""How a model fits this machine and how a text uses its experts, as `pyhobbit inspect` shows it."""
