# SPDX-License-Identifier: MIT
# The mechanisms of papers that are built beside HOBBIT's own, a line each. NAME stands for ggml_ext/src/mechanisms/NAME
# and tests/mechanisms/NAME. To remove one, delete both folders and its line.
set(HOBBIT_MECHANISMS
    early
    partial
    paths
    placement
    replacement
    second_pass
)
