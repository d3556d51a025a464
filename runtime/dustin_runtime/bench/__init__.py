"""Measurements of the runtime on the device at hand, and the documents that report them."""
