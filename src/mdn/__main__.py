import sys

from mdn.cli import main

if __name__ == "__main__":  # not in the processes that vLLM spawns
    sys.exit(main())
