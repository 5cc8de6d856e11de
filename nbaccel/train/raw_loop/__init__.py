"""One training in all ranks from a loop that prepares nothing. `loop` combines the parts in the other modules."""
