# SPDX-License-Identifier: MIT
"""The analyses of the papers: bench/report.py."""
