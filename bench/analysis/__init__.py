# SPDX-License-Identifier: MIT
"""The analyses of the papers: python -m bench.analyse."""
