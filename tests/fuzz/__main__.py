"""``python -m tests.fuzz '<a call>'``: repeat one call of the random search, in a child with poisoned memory."""

import json
import sys

from convgrad.check.child import Child

with Child("tests.fuzz.calls") as child:
    found, death = child.ask(json.loads(sys.argv[1]))
print(death or found or "right")
sys.exit(bool(death or found))
