"""`python -m benchmarks NAME ...` runs one benchmark; without a name it lists them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> int:
    """Run the benchmark named by the first argument with the others."""
    found = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "__main__"}
    if len(sys.argv) < 2 or sys.argv[1] not in found:
        print(f"usage: python -m benchmarks NAME [ARGUMENTS]; NAME is one of {', '.join(found)}", file=sys.stderr)
        return 2
    sys.argv = [str(found[sys.argv[1]]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
