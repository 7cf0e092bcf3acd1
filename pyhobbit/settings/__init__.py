# SPDX-License-Identifier: MIT
"""Settings of a user, checked."""
