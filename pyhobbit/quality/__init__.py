# SPDX-License-Identifier: MIT
"""The quality loss by low precision, and settings that keep it small."""
