"""What a notebook holds: its names, what a cell has changed of them, and how that travels. Used in the kernel and
ranks.
"""
