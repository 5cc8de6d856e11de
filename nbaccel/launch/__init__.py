"""The room that starts, feeds, interrupts and buries processes; it runs any torch code, ours or not."""
