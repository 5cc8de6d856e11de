"""The inside of a rank: its runtime from birth to end, and what it changes of the notebook it was copied from."""
