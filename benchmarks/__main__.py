"""`python -m benchmarks [NAME ...]` runs the named benchmarks, or all; exits with 1 if one misses a bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run each in its own process, so that none warms up another."""
    found = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "__main__"}
    names = sys.argv[1:] or list(found)
    unknown = [name for name in names if name not in found]
    if unknown:
        print(f"benchmarks: unknown: {', '.join(unknown)}; choose from {', '.join(found)}", file=sys.stderr)
        return 2
    return max(subprocess.run([sys.executable, str(found[name])], check=False).returncode for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
