"""The only doors to the operating system: a small Protocol each, and the real one."""
