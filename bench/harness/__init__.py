# SPDX-License-Identifier: MIT
"""Speed and memory of stock llama.cpp and of the expert cache, side by side."""
