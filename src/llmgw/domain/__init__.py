"""Pure decisions on frozen values: no clock, no I/O, no threads. `now` is always an argument."""
