"""Fetches a model that has an alias: `python -m octavo.engine.loading.fetch smollm2`.

Nothing imports this file, so that Python may run it as a module without a warning.
"""

from __future__ import annotations

import argparse
import sys

from .aliases import ALIASES, fetch


def main() -> None:
    """Fetches the model named on the command line and prints where it is."""
    parser = argparse.ArgumentParser(prog="python -m octavo.engine.loading.fetch", description=main.__doc__)
    parser.add_argument("alias", choices=sorted(ALIASES))
    print(fetch(parser.parse_args().alias, progress=lambda line: print(line, file=sys.stderr)))


if __name__ == "__main__":
    main()
