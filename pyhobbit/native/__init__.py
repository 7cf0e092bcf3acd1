# SPDX-License-Identifier: MIT
"""The doors to native code and to this machine: libraries, files, memory, disk."""
