# SPDX-License-Identifier: MIT
"""The experts that routers choose: recorded, observed, replayed, analysed."""
