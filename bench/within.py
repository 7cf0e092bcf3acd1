# SPDX-License-Identifier: MIT
"""Runs any program within a memory limit and with an empty page cache: for other engines beside ours.

python -m bench.within 0.25 MODEL.gguf -- PROGRAM ARGUMENTS...
"""

import subprocess
import sys
import time
from pathlib import Path

from bench.harness import system
from bench.harness.system import option_parser
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import model_parts


def main() -> int:
    """Returns the program's exit status; the time and the most memory go to standard error."""
    parser = option_parser(__doc__)
    parser.add_argument("share", type=float, help="share of the file's size that all memory may have")
    parser.add_argument("model", type=Path, help="the model's file, or its first part")
    parser.add_argument("command", nargs="+", help="program with its arguments, after --")
    args = parser.parse_args()
    try:
        files = [part.path for part in model_parts(args.model)]
        limit = int(args.share * sum(file.stat().st_size for file in files))
        disk = system.disk_bandwidth(args.model) or 0
        system.drop_cached(files)
        with system.memory_cgroup(limit) as cgroup:
            start = time.monotonic()
            status = subprocess.run(cgroup.joining(args.command)).returncode
            seconds, peak = time.monotonic() - start, cgroup.peak() or 0
    except (HobbitError, OSError, ValueError) as e:
        print(f"bench.within: {e}", file=sys.stderr)
        return 1
    memory = f"limit {limit >> 20} MiB, peak {peak >> 20} MiB"
    print(f"{memory}, {seconds:.1f} s, disk {disk / 1e9:.2f} GB/s, status {status}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
