"""One thin file per command of `dustin-run`."""
