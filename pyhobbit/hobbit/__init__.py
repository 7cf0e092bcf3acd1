# SPDX-License-Identifier: MIT
"""llama-cpp-python's interface on the expert cache."""
