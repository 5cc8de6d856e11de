"""Starts, watches, interrupts and ends worker processes; it runs any torch code, ours or not."""
