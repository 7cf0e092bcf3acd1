# SPDX-License-Identifier: MIT
"""A conversation on the terminal."""
