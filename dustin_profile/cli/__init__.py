"""One thin file per command of `dustin-profile`."""
