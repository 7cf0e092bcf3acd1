# SPDX-License-Identifier: MIT
"""A model opened for generating text, and the plan of its memory."""
