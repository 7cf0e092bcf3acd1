# SPDX-License-Identifier: MIT
"""Measurements that compare with stock llama.cpp, and the papers' analyses: README.md lists them."""
