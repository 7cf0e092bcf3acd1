# SPDX-License-Identifier: MIT
"""Sends many requests in a row to `pyhobbit serve` and says by how much its memory grew.

python tests/server_suite/many_requests.py MODEL [-n 1000]
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers import growth, serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(args.model, Path(folder) / "log") as server:
        grown = growth(server, args.n)
    print(f"{args.n} requests: {grown / 2**20:+.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
