"""The offline profiler: finds heads, collects traces, searches the configuration, emits and guards it."""
