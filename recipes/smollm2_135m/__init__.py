"""Training of the draft that ships for SmolLM2-135M. README.md has the commands and what they gave.

prepare → continuations → train → evaluate; each is `python -m recipes.smollm2_135m.NAME` in the repository's root.
"""

import time

BEGAN = time.monotonic()
"""When this process began, near enough: a time limit counts the imports."""
