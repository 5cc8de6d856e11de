"""What a run looks like: its history as plain data, and pictures of it. Runs in the kernel.

A room on the ground floor: it imports no other room, starts nothing, waits for nothing and prints nothing. Whoever
watches a run feeds a `History`; whoever shows it asks a `Panel` or a figure for a picture.
"""
