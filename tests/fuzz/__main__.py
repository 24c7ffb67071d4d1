"""``python -m tests.fuzz '<a call>'``: repeat one call of the random search, in a child with poisoned memory."""

import json
import sys

from convgrad.check.child import Child

from .calls import answer
from .test_fuzz import wrong

if __name__ == "__main__":  # the child imports this file too
    with Child(answer) as child:
        found = wrong(child, json.loads(sys.argv[1]))
    print(found or "right")
    sys.exit(bool(found))
