# SPDX-License-Identifier: MIT
"""What a user may set, checked."""
