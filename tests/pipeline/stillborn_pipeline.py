"""A user's pipeline that cannot be imported."""

import sys

sys.stdout.write("looking for my data\n")
raise LookupError("no data")
