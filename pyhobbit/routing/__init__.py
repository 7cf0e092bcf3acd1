# SPDX-License-Identifier: MIT
"""Which experts the routers choose: recorded, observed, replayed, analysed."""
