import sys

from mdn.cli import main

sys.exit(main())
