"""`import rlix.trl` as the first line of a TRL script makes it a job of the pool; nothing else changes.

`python -m rlix.trl SCRIPT [ARGS]` does the same without that line, also under torchrun and accelerate (`-m rlix.trl`).
"""

import sys

from rlix.integrations.trl.install import install, main

if __name__ == "__main__":
    main(sys.argv[1:])
else:
    install()
