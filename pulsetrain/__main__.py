"""The command `pulsetrain`, as `python -m pulsetrain`."""

from pulsetrain.cli import main

raise SystemExit(main())
