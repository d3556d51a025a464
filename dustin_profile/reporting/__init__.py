"""One page from what runs measured: read, arranged in sections, drawn, written."""
