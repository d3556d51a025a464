"""Sparse verification for long-context speculative decoding: the runtime.

Importing this package costs nothing: torch is imported by the modules that compute.
"""

__version__ = "0.1.0"
