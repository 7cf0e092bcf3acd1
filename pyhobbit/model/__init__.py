# SPDX-License-Identifier: MIT
"""Model files: their format, where they come from and what they hold."""
