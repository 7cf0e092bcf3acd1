# SPDX-License-Identifier: MIT
"""What low precision costs, and the settings that keep it small."""
